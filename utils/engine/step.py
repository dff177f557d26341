"""Training step, from batches to new weights: forward, assignment, loss, backward, reduction, update, EMA, flags.

A step whose gradient is not finite is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.models.heads.criterion import Criterion
from tessera.models.layers.blocks import Conv
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.profile import NoProfile
from tessera.utils.engine.state import Progress, Teach, TrainState, no_teacher
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.ddp import SyncBatchNorm2d, average_statistics, gradients_stay_local
from tessera.utils.seeding import sample_rng
from tessera.utils.types import Batch


@dataclass(frozen=True)
class StepFlags:
    """Flags read back after a step, equal on every rank except `indices`; `StepFlags()` if none were read."""

    step: int = 0  # number of the step in the run, from 1; 0 if no flags were read
    epoch: int = 0  # of the run after the step
    batch: int = 0  # finished batches of that epoch
    skipped: int = 0  # batches of the step if it was skipped, as its gradient was not finite; else 0
    indices: tuple[int, ...] = ()  # images of this rank's batches
    stop: bool = False  # a rank received a stop signal


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    losses: Tensor  # one per name of the criterion: this rank's part of the sum over the batches; 0 if skipped
    objects: int  # in this rank's last batch
    flags: StepFlags  # of the latest finished step: this one on a CPU, the one before on a device with a queue


class TrainStep:
    """Forward, backward and update over a window of batches.

    The gradient is that of Σ over the batches of global batch size × global mean loss, on any number of ranks: each
    rank divides its sums by the counts of all ranks, and the averaging is undone by the number of ranks. One small
    all-reduce during the forward sums the counts and the stop requests, so a step needs no control message.

    Only the device knows at first whether a step was skipped or a stop requested. The host queues the next step and
    then reads the flags of the one before. The state counts a step as taken until its flags are read; `flush` reads
    the rest before a checkpoint.

    Each batch of a window has its own mean loss. Four batches of 16 have the gradient of one of 64 if they have equally
    many positives; otherwise a positive in a batch with fewer of them weighs more, as in YOLOv5.

    `model` is the result of `smart_DDP`; `state.model` is the raw model inside. `observe` is called with the flags of
    each step, as soon as they are read; `teach` with each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainState[Any],
        criterion: Criterion[Any],
        context: RunContext,
        profile: NoProfile | None = None,
        observe: Callable[[StepFlags], None] | None = None,
        teach: Teach = no_teacher,
    ) -> None:
        self._model, self._state, self._criterion = model, state, criterion
        self._context, self._world, self._accelerator = context, context.world, context.world.accelerator
        self._statistics = RunningStatistics(state.model)
        self._reader = FlagReader(self._accelerator)
        self._stage, self._observe, self._teach = (profile or NoProfile()).stage, observe, teach

    def __call__(
        self, batches: Iterable[Batch], window: int, stop_requested: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Train on the next `window` batches of the epoch, and count them in the progress."""
        progress = self._state.progress
        total = torch.zeros(len(self._criterion.names), device=self._world.device)
        indices: list[int] = []
        objects, stop_requests = 0, torch.zeros((), device=self._world.device)
        self._statistics.remember()
        for number, batch in enumerate(batches):
            last = number + 1 == window
            sharing: AbstractContextManager[Any] = nullcontext() if last else gradients_stay_local(self._model)
            with sharing:
                losses, stop_requests = self._accumulate(batch, progress.batch_in_epoch + number, stop_requested)
            total += losses
            objects = int((batch.targets[:, 1] >= 0).sum())
            indices += batch.indices.tolist()
        finite = self._update(window)
        total = torch.where(finite, total, 0.0)
        progress.advance(window, total)
        flags = self._reader.after_step(torch.stack((~finite, stop_requests > 0)), progress, window, tuple(indices))
        return StepResult(total, objects, self._count(flags))

    def _accumulate(self, batch: Batch, number: int, stop_requested: Callable[[], bool]) -> tuple[Tensor, Tensor]:
        """Add the gradient of the epoch's batch `number`; return its losses and the number of stop requests."""
        device, precision = self._world.device, self._state.precision
        with self._stage("copy"):
            images = batch.images_on(device)
            images, targets = scaled_batch(self._context, images, batch.targets, self._state.progress.epoch, number)
        with self._stage("loss"):
            size_hw = (images.shape[2], images.shape[3])
            assignment = self._accelerator.send(self._criterion.assign(targets, len(batch), size_hw, batch.unlabelled))
        with self._stage("teacher"):
            assignment = self._teach(assignment, batch, images)
            # The student's forward does not change the counts: the all-reduce overlaps with it.
            stop_request = torch.full((1,), float(stop_requested()), device=device)
            summing = self._world.begin_sum(torch.cat((assignment.counts.flatten(), stop_request)))
        with self._stage("forward"), precision.autocast():
            predictions = self._model(images)
        with self._stage("loss"):
            counts = summing()
            global_counts = counts[:-1].view_as(assignment.counts)
            loss, losses = self._criterion(predictions, assignment, global_counts, self._world.begin_sum)
            scaled = precision.scaler.scale(loss * (self._context.batch_size * self._world.size))
        with self._stage("backward"):
            scaled.backward()
        return losses, counts[-1]

    def _update(self, window: int) -> Tensor:
        """Clip, step and update the EMA; skip the step if the gradient is not finite.

        The gradient is equal on every rank, so all decide alike without communication, and the device decides without a
        host synchronisation. Returns whether it was finite, bool () on the device.
        """
        state = self._state
        scaler = state.precision.scaler
        with self._stage("optimizer"):
            scaler.unscale_(state.optimizer)
            gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, (self._context.hyp.clip / (norm + 1e-6)).clamp(max=1))
            finite = norm < float("inf")
            _step_where(finite, state.optimizer)
            scaler.update()
            state.optimizer.zero_grad(set_to_none=True)
        with self._stage("EMA"):
            self._statistics.end_step(finite, window)
            average_statistics(self._statistics.own, self._world)
            state.ema.update(state.model, self._accelerator.host_flag(finite))
        return finite

    def flush(self) -> StepFlags:
        """Read the remaining flags, so that the state counts every step correctly."""
        return self._count(self._reader.read())

    def _count(self, flags: StepFlags) -> StepFlags:
        self._state.progress.skip(flags.skipped)
        if flags.skipped:
            self._state.ema.undo_update()
        if flags.step and self._observe:
            self._observe(flags)
        return flags


class FlagReader:
    """Reader of step flags, delayed by as many steps as the device queues."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: deque[tuple[Callable[[], Tensor], StepFlags, int]] = deque()

    def after_step(self, flags: Tensor, progress: Progress, batches: int, indices: tuple[int, ...]) -> StepFlags:
        """Queue the flags of a step; return those that can be read now, of this step or of the one before.

        `flags` are bool (2,) on the device: skipped, stop. `progress` includes the step.
        """
        step = StepFlags(progress.step, progress.epoch, progress.batch_in_epoch, indices=indices)
        self._pending.append((self._accelerator.read_back(flags), step, batches))
        return self.read() if len(self._pending) > self._accelerator.queue_depth else StepFlags()

    def read(self) -> StepFlags:
        """Wait for the flags of the earliest step that are not read yet."""
        if not self._pending:
            return StepFlags()
        wait, step, batches = self._pending.popleft()
        skipped, stop = wait().tolist()
        return replace(step, skipped=batches * skipped, stop=stop)


class RunningStatistics:
    """BatchNorm's running statistics before a step, restored if its forward was not finite; and its counters."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._live = [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]
        own = [m for m in norms if not isinstance(m, SyncBatchNorm2d)]  # statistics of this rank's images
        self.own = [t for m in own for t in (m.running_mean, m.running_var) if t is not None]
        moving = [m for m in model.modules() if isinstance(m, Conv) and not m.frozen_statistics]
        self._counters = [cast(Tensor, conv.bn.num_batches_tracked) for conv in moving]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the present values."""
        if self._live:
            self._saved = torch.cat(self._live)

    @torch.no_grad()
    def end_step(self, finite: Tensor, batches: int) -> None:
        """Count the batches; or restore the copied values if `finite`, bool () on the device, is false."""
        if self._live:
            values = torch.where(finite, torch.cat(self._live), self._saved)
            torch._foreach_copy_(self._live, list(values.split([t.numel() for t in self._live])))
        if self._counters:
            torch._foreach_add_(self._counters, [finite * batches] * len(self._counters))


def _step_where(taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer if `taken`, bool () on its device, is true.

    Fused kernels skip by a flag on the device, made for torch's GradScaler, without a host synchronisation. For others
    the host reads the flag.
    """
    if not optimizer.defaults.get("fused"):
        if taken:
            optimizer.step()
        return
    optimizer.found_inf = (~taken).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


def scaled_size(seed: int, epoch: int, batch: int, imgsz: int, stride: int) -> int:
    """Return the longer side of a global batch's images: uniform in [0.5, 1.5) · imgsz, rounded down to the stride."""
    return _floored(int(sample_rng(seed, epoch, batch, "size").integers(imgsz // 2, imgsz * 3 // 2)), stride)


def smallest_size(imgsz: int, stride: int) -> int:
    """Return the smallest value of `scaled_size`."""
    return _floored(imgsz // 2, stride)


def largest_size(imgsz: int, stride: int) -> int:
    """Return the largest value of `scaled_size`."""
    return _floored(imgsz * 3 // 2 - 1, stride)


def scaled_hw(size_hw: Sequence[int], factor: float, stride: int) -> tuple[int, int]:
    """Return the multiples of the stride that are nearest to `factor` times a height and width."""
    height, width = (max(round(side * factor / stride), 1) * stride for side in size_hw)
    return height, width


def _floored(size: int, stride: int) -> int:
    return max(size // stride, 1) * stride


def min_images(size: int, stride: int) -> int:
    """Return how many images of longer side `size` a normalisation needs: a single value has no variance."""
    return 2 if size <= stride else 1


def scaled_batch(context: RunContext, images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return images (B, 3, H, W) and targets at the size of global batch `batch`, with `--multi-scale`."""
    config, stride = context.config, context.stride
    if not config.multi_scale:
        return images, targets
    factor = scaled_size(config.seed, epoch, batch, context.longer_side, stride) / context.longer_side
    height, width = scaled_hw(images.shape[2:], factor, stride)
    scale_y, scale_x = height / images.shape[2], width / images.shape[3]
    scaled = F.interpolate(images, (height, width), mode="bilinear", align_corners=False)
    return scaled, targets * torch.tensor((1, 1, scale_x, scale_y, scale_x, scale_y, 1))[: targets.shape[1]]
