"""One optimizer step, however many batches and ranks it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.distributed import World, average_statistics, gradients_stay_local
from utils.ema import ModelEMA
from utils.optim import MAX_GRAD_NORM
from utils.precision import Precision
from utils.structures import Batch


class Claims(Protocol):
    """Which predictions answer for which targets, as a criterion assigned them."""

    counts: Tensor

    def to(self, device: torch.device) -> Claims:
        """The same on the device."""


class Criterion(Protocol):
    """What a step asks of the loss that belongs to a model's head."""

    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> Any:
        """Host work before the forward; the result has `counts` and `to`."""

    def __call__(self, predictions: Any, assignment: Any, global_counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """This rank's part of the mean loss over all ranks' images, and its parts (3,)."""


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
class StepResult:
    """What a step came to, with `skipped` and `stop` the same on every rank.

    Attributes:
        losses: (3,) box, obj, cls: this rank's part of the sum over the batches; 0 where skipped.
        objects: in this rank's last batch.
        indices: images of this rank's batches.
        skipped: the gradient was not finite on some rank, and no rank took the step.
        stop: some rank was asked to stop.
    """

    losses: Tensor
    objects: int
    indices: tuple[int, ...]
    skipped: bool
    stop: bool


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
    """

    def __init__(
        self,
        model: nn.Module,
        raw_model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        ema: ModelEMA[Any],
        world: World,
        batch_size: int,
        resize: Resize,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._model, self._raw_model = model, raw_model
        self._criterion, self._optimizer, self._precision, self._ema = criterion, optimizer, precision, ema
        self._world, self._batch_size, self._resize, self._asked_to_stop = world, batch_size, resize, asked_to_stop
        self._statistics = RunningStatistics(raw_model)
        self._votes = Votes(world.device)

    def __call__(self, batches: Iterable[Batch], window: int, epoch: int, first: int) -> StepResult:
        """Train on `window` batches, the first of which is global batch `first` of `epoch`."""
        total = torch.zeros(3, device=self._world.device)
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
        skipped = not self._update()
        if skipped:
            total.zero_()
        return StepResult(total, objects, tuple(indices), skipped, self._votes.count(votes))

    def _accumulate(self, batch: Batch, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Add a batch's gradient; return its losses (3,) and how many ranks were asked to stop."""
        device = self._world.device
        images, targets = self._resize(batch.images_on(device), batch.targets, epoch, number)
        size_hw = (images.shape[2], images.shape[3])
        # Who answers for which object does not depend on predictions: the counts travel while the model computes.
        assignment = self._criterion.assign(targets, len(batch), size_hw).to(device)
        wish = torch.full((1,), float(self._asked_to_stop()), device=device)
        census = self._world.sum_later(torch.cat((assignment.counts.flatten(), wish)))
        with self._precision.autocast():
            predictions = self._model(images)
        counts = census()
        loss, losses = self._criterion(predictions, assignment, counts[:-1].view_as(assignment.counts))
        scaled = self._precision.scaler.scale(loss * (self._batch_size * self._world.size))
        scaled.backward()
        return losses, counts[-1]

    def _update(self) -> bool:
        """Clip, step, and let the average follow; False where the gradient is not finite, and nothing has changed.

        The gradient is the same on every rank, so all decide alike without a word.
        """
        scaler = self._precision.scaler
        scaler.unscale_(self._optimizer)
        norm = nn.utils.clip_grad_norm_(self._raw_model.parameters(), MAX_GRAD_NORM)
        finite = bool(torch.isfinite(norm))
        if finite:
            scaler.step(self._optimizer)
            average_statistics(self._model)
            self._ema.update(self._raw_model)
        else:
            self._statistics.restore()
        scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return finite


class RunningStatistics:
    """BatchNorm's running statistics before a step: a forward that is not finite would spoil them for good."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._live = [t for m in norms for t in (m.running_mean, m.running_var, m.num_batches_tracked) if t is not None]
        self._kept = [t.clone() for t in self._live]

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the present values."""
        torch._foreach_copy_(self._kept, self._live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the kept values back."""
        torch._foreach_copy_(self._live, self._kept)


class Votes:
    """Reads the number of ranks that were asked to stop.

    On CUDA, reading it at once would stall the queue; there it is read a step later, on all ranks alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._late = device.type == "cuda"
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def count(self, votes: Tensor) -> bool:
        """Whether any rank was asked to stop, in this step or, on CUDA, in the one before."""
        if not self._late:
            return bool(votes > 0)
        host = torch.empty((), pin_memory=True)
        host.copy_(votes, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append((host, done))
        if len(self._pending) < 2:
            return False
        earlier, copied = self._pending.popleft()
        copied.synchronize()
        return bool(earlier > 0)


class SkippedSteps:
    """Counts the steps that were skipped, and ends a run in which ten in a row were."""

    LIMIT = 10

    def __init__(self) -> None:
        self.in_a_row = 0

    def note(self, skipped: bool) -> bool:
        """Take in a step; return whether the limit is reached."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return self.in_a_row >= self.LIMIT


def shown_paths(paths: Sequence[str], most: int = 8) -> str:
    """A few paths, and how many more there are."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
