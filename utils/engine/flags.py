"""Flags of a step, brought from the device to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from tessera.utils.engine.state import Progress
from tessera.utils.machine.accelerator import Accelerator


@dataclass(frozen=True)
class StepFlags:
    """Flags read back after a step; but for `indices` the same on every rank. `StepFlags()` where none were read.

    Attributes:
        step: number of the step in the run, from 1; 0 where no flags were read.
        epoch, batch: where the run stood after it: batches of the epoch that were done.
        skipped: batches of the step, where its gradient was not finite on some rank and every rank skipped it; else 0.
        indices: images of this rank's batches.
        stop: some rank was asked to stop.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    skipped: int = 0
    indices: tuple[int, ...] = ()
    stop: bool = False


class FlagReader:
    """Reads the flags of a step: at once, or as many steps later as the device has queued."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: deque[tuple[Callable[[], Tensor], StepFlags, int]] = deque()

    def after_step(self, flags: Tensor, progress: Progress, batches: int, indices: tuple[int, ...]) -> StepFlags:
        """Flags that can be read now: of this step, or of the one before.

        Args:
            flags: bool (2,) on the device: skipped, stop.
            progress: with this step counted.
            batches: of the step.
            indices: images of this rank's batches.
        """
        step = StepFlags(progress.step, progress.epoch, progress.step_in_epoch, indices=indices)
        self._pending.append((self._accelerator.read_back(flags), step, batches))
        return self.read() if len(self._pending) > self._accelerator.queue_depth else StepFlags()

    def read(self) -> StepFlags:
        """Wait for the flags of the earliest step whose flags were not read yet."""
        if not self._pending:
            return StepFlags()
        wait, step, batches = self._pending.popleft()
        skipped, stop = wait().tolist()
        return replace(step, skipped=batches * skipped, stop=stop)
