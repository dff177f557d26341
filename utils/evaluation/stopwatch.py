"""How long the stages of a validation take."""

from __future__ import annotations

import time

from utils.machine.accelerator import Accelerator


class Stopwatch:
    """Seconds spent in each stage, with the device's queue emptied at each reading."""

    STAGES = ("preparation", "inference", "nms")

    def __init__(self, accelerator: Accelerator) -> None:
        self.seconds = dict.fromkeys(self.STAGES, 0.0)
        self._accelerator = accelerator
        self._last = 0.0

    def begin(self) -> None:
        """Start the first stage of a batch."""
        self._last = self._now()

    def lap(self, stage: str) -> None:
        """Book the time since the last reading on `stage`."""
        now = self._now()
        self.seconds[stage] += now - self._last
        self._last = now

    def _now(self) -> float:
        self._accelerator.synchronize()
        return time.perf_counter()
