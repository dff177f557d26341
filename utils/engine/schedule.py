"""Learning rates, momentum and accumulation: a pure function of the iteration (one iteration = one global batch).

So a resumed run continues it exactly, and `--epochs M` rebuilds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from utils.config import Hyp

NOMINAL_BATCH = 64  # images that one optimizer step stands for; smaller batches are accumulated


def accumulation(batch_size: int) -> int:
    """Batches an optimizer step, after the warm-up. Each keeps a mean loss of its own (see `TrainStep`)."""
    return max(round(NOMINAL_BATCH / batch_size), 1)


@dataclass(frozen=True)
class Schedule:
    """Learning rates, momentum and accumulation by iteration.

    Attributes:
        hyp: lr0, lrf, momentum and the warm-up's values.
        epochs: epochs in all.
        batches_per_epoch: global batches an epoch.
        batch_size: images a batch over all ranks.
        cosine: cosine from 1 to lrf instead of a line.
    """

    hyp: Hyp
    epochs: int
    batches_per_epoch: int
    batch_size: int
    cosine: bool = False

    @property
    def warmup_iterations(self) -> int:
        """Iterations of the warm-up: at least 100."""
        return max(round(self.hyp.warmup_epochs * self.batches_per_epoch), 100)

    def factor(self, epoch: int) -> float:
        """Fraction of lr0 in `epoch`, from 1 to lrf."""
        progress = epoch / self.epochs
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.cosine else 1 - progress
        return fall * (1 - self.hyp.lrf) + self.hyp.lrf

    def learning_rates(self, iteration: int) -> tuple[float, float, float]:
        """Rates of biases, weights and norm weights."""
        target = self.hyp.lr0 * self.factor(iteration // self.batches_per_epoch)
        bias = self._warm(iteration, self.hyp.warmup_bias_lr, target)
        other = self._warm(iteration, 0.0, target)
        return bias, other, other

    def momentum(self, iteration: int) -> float:
        """SGD's momentum, Adam's beta1."""
        return self._warm(iteration, self.hyp.warmup_momentum, self.hyp.momentum)

    def window(self, iteration: int) -> int:
        """Batches of the optimizer step that begins at `iteration`; it never reaches into the next epoch.

        The number of batches grows during the warm-up, so the step ends at the first batch by which it is reached.
        """
        left = self.batches_per_epoch - iteration % self.batches_per_epoch
        for size in range(1, left + 1):
            needed = max(round(self._warm(iteration + size - 1, 1.0, NOMINAL_BATCH / self.batch_size)), 1)
            if size >= needed:
                return size
        return left

    def apply(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Set the optimizer's rates and momentum for the step that ends at `iteration`."""
        momentum = self.momentum(iteration)
        for group, rate in zip(optimizer.param_groups, self.learning_rates(iteration), strict=True):
            group["lr"] = rate
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum

    def _warm(self, iteration: int, start: float, end: float) -> float:
        return float(np.interp(iteration, (0, self.warmup_iterations), (start, end)))
