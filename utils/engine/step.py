"""One optimizer step, however many batches and ranks it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.criterion import Criterion
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import MAX_GRAD_NORM, step_where
from utils.engine.precision import Precision
from utils.engine.profile import NoProfile
from utils.machine.accelerator import Accelerator
from utils.ranks.world import World, average_statistics, gradients_stay_local
from utils.types import Batch


@dataclass(frozen=True)
class Resize:
    """`--multi-scale`: another size for each batch, the same on every rank.

    Attributes:
        size_of: size in pixels by epoch and global batch; None where the size stays.
        stride: both sides are multiples of it.
    """

    size_of: Callable[[int, int], int] | None
    stride: int

    def __call__(self, images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) and their targets (T, 6) at the size of global batch `batch` of `epoch`."""
        if self.size_of is None:
            return images, targets
        factor = self.size_of(epoch, batch) / max(images.shape[2:])
        height, width = (max(round(side * factor / self.stride), 1) * self.stride for side in images.shape[2:])
        scale_y, scale_x = height / images.shape[2], width / images.shape[3]
        resized = F.interpolate(images, (height, width), mode="bilinear", align_corners=False)
        return resized, targets * torch.tensor((1, 1, scale_x, scale_y, scale_x, scale_y))


@dataclass(frozen=True)
class Told:
    """What the device said of a step; but for `indices` the same on every rank.

    Attributes:
        skipped: batches of the step, where its gradient was not finite on some rank and no rank took it; else 0.
        indices: images of this rank's batches.
        stop: some rank was asked to stop.
    """

    skipped: int = 0
    indices: tuple[int, ...] = ()
    stop: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step came to.

    Attributes:
        losses: one for each of the criterion's names: this rank's part of the sum over the batches; 0 where skipped.
        objects: in this rank's last batch.
        told: what the device said of a step: of this one, or on CUDA of the one before.
    """

    losses: Tensor
    objects: int
    told: Told


class TrainStep:
    """Forward, backward and update over a window of batches.

    The gradient is that of Σ over the batches of global batch size × global mean loss, however many ranks share a
    batch: each rank divides its sums by the counts of all, and DDP's averaging is undone by the number of ranks. The
    counts travel in one small message while the model computes, and with them whether a rank was asked to stop: no
    control message is needed in a step.

    Args:
        model: as `smart_DDP` returned it; raw_model is the one inside.
        criterion, optimizer, precision, ema: as in the training loop.
        world: this rank.
        batch_size: images a batch over all ranks.
        resize: for `--multi-scale`.
        asked_to_stop: whether this rank was.
        profile: what the stages of a step are booked on.
    """

    def __init__(
        self,
        model: nn.Module,
        raw_model: nn.Module,
        criterion: Criterion[Any],
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        ema: ModelEMA[Any],
        world: World,
        batch_size: int,
        resize: Resize,
        asked_to_stop: Callable[[], bool],
        profile: NoProfile | None = None,
    ) -> None:
        self._model, self._raw_model = model, raw_model
        self._criterion, self._optimizer, self._precision, self._ema = criterion, optimizer, precision, ema
        self._world, self._batch_size, self._resize, self._asked_to_stop = world, batch_size, resize, asked_to_stop
        self._statistics = RunningStatistics(raw_model)
        self._flags = Flags(world.accelerator)
        self._stage = (profile or NoProfile()).stage

    def __call__(self, batches: Iterable[Batch], window: int, epoch: int, first: int) -> StepResult:
        """Train on `window` batches, the first of which is global batch `first` of `epoch`."""
        total = torch.zeros(len(self._criterion.names), device=self._world.device)
        indices: list[int] = []
        objects = 0
        votes = total
        self._statistics.remember()
        for number, batch in enumerate(batches):
            last = number + 1 == window
            sharing: AbstractContextManager[Any] = nullcontext() if last else gradients_stay_local(self._model)
            with sharing:
                losses, votes = self._accumulate(batch, epoch, first + number)
            total += losses
            objects = len(batch.targets)
            indices += batch.indices.tolist()
        finite = self._update()
        told = self._flags.tell(torch.stack((~finite, votes > 0)), window, tuple(indices))
        return StepResult(torch.where(finite, total, 0.0), objects, self._noted(told))

    def settle(self) -> Told:
        """What is still to be told of the last step; after that the state is that of the steps taken."""
        return self._noted(self._flags.settle())

    def _noted(self, told: Told) -> Told:
        if told.skipped:
            self._ema.take_back()
        return told

    @property
    def loss_scale(self) -> float:
        """Of the GradScaler: 1 where there is none."""
        return self._precision.scaler.get_scale()

    def _accumulate(self, batch: Batch, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Add a batch's gradient; return its losses and how many ranks were asked to stop."""
        device = self._world.device
        with self._stage("copy"):
            images, targets = self._resize(batch.images_on(device), batch.targets, epoch, number)
        with self._stage("loss"):
            size_hw = (images.shape[2], images.shape[3])
            # What depends on the labels alone is counted before the forward, and summed over the ranks during it.
            assignment = self._world.accelerator.send(self._criterion.assign(targets, len(batch), size_hw))
            wish = torch.full((1,), float(self._asked_to_stop()), device=device)
            pending = self._world.sum_later(torch.cat((assignment.counts.flatten(), wish)))
        with self._stage("forward"), self._precision.autocast():
            predictions = self._model(images)
        with self._stage("loss"):
            counts = pending()
            global_counts = counts[:-1].view_as(assignment.counts)
            loss, losses = self._criterion(predictions, assignment, global_counts, self._world.sum_later)
            scaled = self._precision.scaler.scale(loss * (self._batch_size * self._world.size))
        with self._stage("backward"):
            scaled.backward()
        return losses, counts[-1]

    def _update(self) -> Tensor:
        """Clip, step, and let the average follow. Where the gradient is not finite, all of it comes to nothing.

        The gradient is the same on every rank, so all do alike without a word; and the device decides for itself, so
        that the host need not wait for it.

        Returns:
            Whether the gradient was finite, bool () on the device.
        """
        scaler = self._precision.scaler
        with self._stage("optimizer"):
            scaler.unscale_(self._optimizer)
            norm = nn.utils.clip_grad_norm_(self._raw_model.parameters(), MAX_GRAD_NORM)
            finite = torch.isfinite(norm)
            step_where(finite, self._optimizer)
            scaler.update()
            self._optimizer.zero_grad(set_to_none=True)
        with self._stage("EMA"):
            self._statistics.restore_unless(finite)
            if self._world.size > 1:
                average_statistics(self._model)
            self._ema.update(self._raw_model, finite if self._world.accelerator.asynchronous else bool(finite))
        return finite


class RunningStatistics:
    """BatchNorm's running statistics before a step: a forward that is not finite would spoil them for good."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        live = [t for m in norms for t in (m.running_mean, m.running_var, m.num_batches_tracked) if t is not None]
        self._live = [
            kind for kind in ([t for t in live if t.is_floating_point() == real] for real in (True, False)) if kind
        ]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the present values."""
        self._kept = [_flat(live) for live in self._live]

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Put the kept values back where `finite`, bool () on the device, is false."""
        for live, kept in zip(self._live, self._kept, strict=True):
            parts = torch.where(finite, _flat(live), kept).split([t.numel() for t in live])
            torch._foreach_copy_(live, [part.view_as(t) for part, t in zip(parts, live, strict=True)])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class Flags:
    """Brings flags of a step to the host.

    On CUDA, reading them at once would stall the queue; there they are read a step later, on all ranks alike.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: deque[tuple[Callable[[], Tensor], int, tuple[int, ...]]] = deque()

    def tell(self, flags: Tensor, batches: int, indices: tuple[int, ...]) -> Told:
        """What is known after a step of so many batches, whose flags are bool (2,): skipped, stop."""
        if not self._accelerator.asynchronous:
            return _told(flags, batches, indices)
        self._pending.append((self._accelerator.read_back(flags), batches, indices))
        return self.settle() if len(self._pending) > 1 else Told()

    def settle(self) -> Told:
        """What was not told yet of the step that was made first."""
        if not self._pending:
            return Told()
        read, batches, indices = self._pending.popleft()
        return _told(read(), batches, indices)


def _told(flags: Tensor, batches: int, indices: tuple[int, ...]) -> Told:
    skipped, stop = flags.tolist()
    return Told(batches * skipped, indices, stop)


class SkippedSteps:
    """Counts the steps that were skipped, and ends a run in which ten in a row were.

    While a GradScaler still has a scale to halve, a skipped step is how it finds one that fits.
    """

    LIMIT = 10

    def __init__(self) -> None:
        self.in_a_row = 0

    def note(self, skipped: bool, loss_scale: Callable[[], float]) -> bool:
        """Take in a step; return whether the limit is reached."""
        if not skipped:
            self.in_a_row = 0
        elif loss_scale() <= 1:
            self.in_a_row += 1
        return self.in_a_row >= self.LIMIT


def shown_paths(paths: Sequence[str], most: int = 8) -> str:
    """A few paths, and how many more there are."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
