"""Mutable state of a training, which a checkpoint stores: progress, EMA, early stopping, and their sum `TrainState`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion
from tessera.utils.engine.context import RunContext, TrainingData
from tessera.utils.engine.precision import Precision
from tessera.utils.types import Batch

M = TypeVar("M", bound=nn.Module)

DECAY, WARMUP = 0.9999, 2000.0  # of the EMA: largest decay; updates until 63 % of it
INITIAL = -1  # in place of an epoch: the initial weights


@dataclass
class Progress:
    """Position of a run, and its losses so far."""

    # float32 (L,), one per loss of the criterion: this rank's part of the sum over the batches of `epoch` so far.
    losses: Tensor
    epoch: int = 0  # the current one, from 0
    step: int = 0  # optimizer steps so far, skipped ones included
    batch_in_epoch: int = 0  # finished global batches of `epoch`; 0 between epochs
    skipped_batches: int = 0  # those of them whose gradient was not finite
    skipped_steps: int = 0  # optimizer steps whose gradient was not finite
    class_maps: tuple[float, ...] = ()  # AP per class in the latest validation, for `--image-weights`

    def advance(self, batches: int, losses: Tensor) -> None:
        """Count an optimizer step over `batches` batches, with the sum of their losses."""
        self.step += 1
        self.batch_in_epoch += batches
        self.losses = self.losses + losses

    def skip(self, batches: int) -> None:
        """Mark the last counted step, over `batches` batches, as skipped; 0 if it was not."""
        self.skipped_batches += batches
        self.skipped_steps += batches > 0

    @property
    def epoch_counted(self) -> int:
        """Batches that `losses` is a sum over: the finished ones without the skipped ones."""
        return self.batch_in_epoch - self.skipped_batches

    def mean_losses(self) -> Tensor:
        """Return this rank's part of the mean losses, (L,); NaN if all batches were skipped."""
        counted = self.epoch_counted
        return self.losses / counted if counted else torch.full_like(self.losses, float("nan"))

    def convert_batches(self, before: int, after: int, images: int) -> None:
        """Convert the position in the epoch from batches of `before` images to batches of `after`.

        It is rounded down, so some images may repeat. The epoch is finished if all of its `images` were used. The mean
        losses stay equal.
        """
        counted, batches = self.epoch_counted, self.batch_in_epoch
        done = batches * before
        self.batch_in_epoch = done // after if done < images else -(-images // after)
        self.skipped_batches = self.skipped_batches * self.batch_in_epoch // max(batches, 1)
        self.losses = self.losses * (self.epoch_counted / counted if counted else 0.0)

    def finish_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.batch_in_epoch = self.skipped_batches = 0
        self.losses = torch.zeros_like(self.losses)


def ema_decay(updates: int, fraction: float = 0.0) -> float:
    """Return the weight of the old average in update number `updates`, from 1.

    The decay grows, so that the average follows early training. Without `fraction` it is YOLOv5's
    0.9999 (1 − exp(−n / 2000)), which suits a hundred thousand updates. With it, the average covers that fraction of
    all updates so far: d = min(0.9999, 1 − 1 / (1 + fraction · n)).
    """
    if fraction == 0:
        return DECAY * (1 - math.exp(-updates / WARMUP))
    return min(DECAY, 1 - 1 / (1 + fraction * updates))


class ModelEMA(Generic[M]):
    """EMA over all floating-point parameters and buffers of a model, in fp32; `fraction` as in `ema_decay`."""

    def __init__(self, model: M, fraction: float = 0.0) -> None:
        self.model: M = copy.deepcopy(model).eval().requires_grad_(False)  # the averaged copy
        self.updates = 0
        self._fraction = fraction
        self._tensors: tuple[list[Tensor], ...] | None = None  # as in `update`

    @torch.no_grad()
    def update(self, model: nn.Module, taken: Tensor | bool = True) -> None:
        """Move the average towards the state of the raw `model`, and count the update.

        `model` is the same module in every call. Without `taken`, whether the optimizer took its step, the average
        stays. As a bool () tensor on the model's device it needs no host synchronisation; the caller then calls
        `undo_update` once it knows that a step was skipped.
        """
        self.updates += 1
        if self._tensors is None:  # floating-point tensors are averaged, the others copied
            own, raw = self.model.state_dict(), model.state_dict()  # the tensors themselves, detached
            real = [name for name, tensor in own.items() if tensor.is_floating_point()]
            rest = [name for name in own if name not in real]
            self._tensors = tuple([state[name] for name in names] for names in (real, rest) for state in (own, raw))
        averages, values, others, copied = self._tensors
        weight = 1 - ema_decay(self.updates, self._fraction)
        if isinstance(taken, Tensor):
            steps = torch._foreach_sub(values, averages)
            torch._foreach_mul_(steps, taken * weight)
            torch._foreach_add_(averages, steps)
        else:
            torch._foreach_lerp_(averages, values, weight * taken)
        if others:
            torch._foreach_copy_(others, copied)

    def undo_update(self) -> None:
        """Undo the count of an update whose step was skipped."""
        self.updates -= 1


class EarlyStopping:
    """Record of the best epoch by its score, the value of `--metric`, and the decision to stop.

    Attributes:
        best_score, best_epoch: of the best epoch so far; the later of equal ones. −∞ and None while no epoch has a
            finite score. `INITIAL` if the initial weights are better than every epoch.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience  # epochs without improvement after which to stop; 0 = never
        self.best_score = float("-inf")
        self.best_epoch: int | None = None
        self.improved_epoch: int | None = None  # the first epoch with this score, from which patience counts

    def update(self, epoch: int, score: float | None) -> bool:
        """Record an epoch's score, None if it was not validated; return whether to stop after it."""
        if score is None:
            return False
        if math.isfinite(score) and score >= self.best_score:
            if score > self.best_score:
                self.improved_epoch = epoch
            self.best_score, self.best_epoch = score, epoch
        return self.has_run_out(epoch)

    def has_run_out(self, epoch: int) -> bool:
        """Return whether patience ends with a validated epoch, from 0."""
        return self.patience > 0 and epoch - max(self.improved_epoch or 0, 0) >= self.patience

    def has_stopped(self, epochs_done: int) -> bool:
        """Return whether a run of `epochs_done` epochs has stopped early."""
        return self.best_epoch is not None and self.has_run_out(epochs_done - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; patience belongs to the configuration."""
        epochs = {"best_epoch": self.best_epoch or 0, "improved_epoch": self.improved_epoch or 0}
        return {"best_fitness": self.best_score, **epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of `state_dict`; older files lack improved_epoch."""
        self.best_score = float(state["best_fitness"])
        if math.isfinite(self.best_score):
            self.best_epoch = int(state["best_epoch"])
            self.improved_epoch = int(state.get("improved_epoch", self.best_epoch))


@dataclass
class TrainState(Generic[M]):
    """All that changes while training; utils/checkpoints/resume.py saves and restores it in place."""

    model: M  # raw, not wrapped
    ema: ModelEMA[M]
    optimizer: torch.optim.Optimizer
    precision: Precision
    stopper: EarlyStopping
    progress: Progress

    def epochs_left(self, epochs: int) -> range:
        """Return the epochs still to be trained, out of `epochs`; none after an early stop."""
        first = self.progress.epoch
        return range(first, first if self.progress.batch_in_epoch == 0 and self.stopper.has_stopped(first) else epochs)


# Adds a teacher's targets to the assignment of a batch, whose images are float (B, 3, H, W) on the device.
Teach = Callable[[Any, Batch, Tensor], Any]


def no_teacher(assignment: Any, batch: Batch, images: Tensor) -> Any:
    """Return the assignment: `Teach` without a teacher."""
    return assignment


@dataclass(frozen=True)
class Training:
    """A run that is ready to train; its observers get it."""

    context: RunContext
    data: TrainingData
    state: TrainState[DetectionModel]
    criterion: Criterion[Any]
    teach: Teach = no_teacher
