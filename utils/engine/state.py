"""What changes while a run trains: where it stands, and all that a later run needs to resume from there."""

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
    """Where a run stands."""

    # float32 (L,), one for each loss of the criterion: this rank's part of the sum over the batches of `epoch` so far.
    losses: Tensor
    epoch: int = 0  # the current one, from 0
    step: int = 0  # optimizer steps so far, skipped ones included
    step_in_epoch: int = 0  # global batches of `epoch` that are done; 0 between epochs
    epoch_skipped: int = 0  # of those batches, the ones whose gradient was not finite
    skipped_steps: int = 0  # such steps so far
    class_maps: tuple[float, ...] = ()  # AP of each class in the latest validation, which `--image-weights` go by

    def advance(self, batches: int, losses: Tensor) -> None:
        """Count an optimizer step over so many batches, with the sum of their losses."""
        self.step += 1
        self.step_in_epoch += batches
        self.losses = self.losses + losses

    def skip(self, batches: int) -> None:
        """A step over so many batches, counted already, was not taken; 0 where it was."""
        self.epoch_skipped += batches
        self.skipped_steps += batches > 0

    @property
    def epoch_counted(self) -> int:
        """Batches of the epoch that `losses` are a sum over: all that are done but the skipped ones."""
        return self.step_in_epoch - self.epoch_skipped

    def mean_losses(self) -> Tensor:
        """(L,): this rank's part of the mean over the epoch's batches so far; NaN where all were skipped."""
        counted = self.epoch_counted
        return self.losses / counted if counted else torch.full_like(self.losses, float("nan"))

    def convert_batches(self, before: int, after: int, images: int) -> None:
        """Express the position in the epoch, counted in batches of `before` images, in batches of `after`.

        It is rounded down, so some images may be trained on again. Where all of an epoch's images were trained on, or
        more than it has now, the epoch is done. The mean losses stay.

        Args:
            before, after: sizes of a global batch.
            images: in an epoch now.
        """
        counted, batches = self.epoch_counted, self.step_in_epoch
        done = batches * before
        self.step_in_epoch = done // after if done < images else -(-images // after)
        self.epoch_skipped = self.epoch_skipped * self.step_in_epoch // max(batches, 1)
        self.losses = self.losses * (self.epoch_counted / counted if counted else 0.0)

    def finish_epoch(self) -> None:
        """Stand at the start of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = self.epoch_skipped = 0
        self.losses = torch.zeros_like(self.losses)


@dataclass
class TrainState(Generic[M]):
    """All that changes while training; utils/checkpoints/training_state.py turns it into a checkpoint and back.

    It is restored in place; of the precision, the loss scale and the generator of its accelerator.
    """

    model: M  # the raw one, not a wrapper of it
    ema: ModelEMA[M]
    optimizer: torch.optim.Optimizer
    precision: Precision
    stopper: EarlyStopping
    progress: Progress

    def epochs_left(self, epochs: int) -> range:
        """Those still to be trained, of so many in all; none where the run has stopped early."""
        first = self.progress.epoch
        return range(first, first if self.progress.step_in_epoch == 0 and self.stopper.has_stopped(first) else epochs)
