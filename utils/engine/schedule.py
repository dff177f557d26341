"""Learning rates, momentum and accumulation as pure functions of the iteration (one iteration = one global batch).

A resumed run therefore continues the schedule exactly, and `--epochs M` rebuilds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tessera.utils.config import Hyp


def nominal_batch(hyp: Hyp, batch_size: int) -> float:
    """Return the images per optimizer step; smaller batches are accumulated."""
    return hyp.nominal_batch or batch_size


def accumulation(hyp: Hyp, batch_size: int) -> int:
    """Return the batches per optimizer step after the warm-up. Each has its own mean loss (see `TrainStep`)."""
    return max(round(nominal_batch(hyp, batch_size) / batch_size), 1)


@dataclass(frozen=True)
class Schedule:
    """Schedule of a run by iteration."""

    hyp: Hyp
    epochs: int
    batches_per_epoch: int
    batch_size: int  # over all ranks
    cosine: bool = False  # cosine decay, regardless of `hyp`

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return self.epochs * self.batches_per_epoch

    @property
    def warmup_iterations(self) -> int:
        """Iterations of the warm-up: the longest of three, at most `warmup_max_fraction` of the run."""
        hyp, batches = self.hyp, self.iterations
        length = max(hyp.warmup_epochs * self.batches_per_epoch, hyp.warmup_fraction * batches, hyp.warmup_min_batches)
        return max(round(min(length, hyp.warmup_max_fraction * batches) if hyp.warmup_max_fraction else length), 1)

    @property
    def cosine_share(self) -> float:
        """Weight of the cosine in the decay, 0 to 1; the rest is linear."""
        return 1.0 if self.cosine else self.hyp.cosine

    def factor(self, epoch: int) -> float:
        """Return the fraction of lr0 in `epoch`: 1 in the flat part, then from 1 to lrf."""
        progress = max((epoch / self.epochs - self.hyp.flat_fraction) / (1 - self.hyp.flat_fraction), 0.0)
        curve, line = (1 + math.cos(math.pi * progress)) / 2, 1 - progress
        fall = self.cosine_share * curve + (1 - self.cosine_share) * line
        return fall * (1 - self.hyp.lrf) + self.hyp.lrf

    def learning_rates(self, iteration: int) -> tuple[float, float, float]:
        """Return the rates of biases, weights and norm weights; with `layer_decay`, those of the head."""
        target = self.hyp.lr0 * self.factor(iteration // self.batches_per_epoch)
        bias = self._warm(iteration, self.hyp.warmup_bias_lr, target)
        other = self._warm(iteration, 0.0, target)
        return bias, other, other

    def momentum(self, iteration: int) -> float:
        """Return SGD's momentum, or Adam's beta1."""
        return self._warm(iteration, self.hyp.warmup_momentum, self.hyp.momentum)

    def window(self, iteration: int) -> int:
        """Return how many batches the optimizer step that begins at `iteration` accumulates, all of one epoch.

        The accumulation grows within the warm-up. A step ends with the first batch at which it has enough of them.
        """
        left = self.batches_per_epoch - iteration % self.batches_per_epoch
        full = nominal_batch(self.hyp, self.batch_size) / self.batch_size
        for size in range(1, left + 1):
            needed = max(round(self._warm(iteration + size - 1, 1.0, full)), 1)
            if size >= needed:
                return size
        return left

    def steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        warming = min(-(-self.warmup_iterations // self.batches_per_epoch), self.epochs)  # later epochs are equal
        return sum(map(self._steps_of, range(warming))) + (self.epochs - warming) * self._steps_of(warming)

    def _steps_of(self, epoch: int) -> int:
        iteration, steps = epoch * self.batches_per_epoch, 0
        while iteration < (epoch + 1) * self.batches_per_epoch:
            iteration, steps = iteration + self.window(iteration), steps + 1
        return steps

    def apply(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Set the rates and momentum of `build_optimizer`'s groups for the step that ends at `iteration`."""
        momentum, rates = self.momentum(iteration), self.learning_rates(iteration)
        for group in optimizer.param_groups:
            group["lr"] = rates[group["kind"]] * group["lr_scale"]
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum

    def _warm(self, iteration: int, start: float, end: float) -> float:
        return float(np.interp(iteration, (0, self.warmup_iterations), (start, end)))
