"""Mutable state of a training: progress, and all that a resumed run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.utils.engine.ema import ModelEMA
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.stopping import EarlyStopping

M = TypeVar("M", bound=nn.Module)


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
