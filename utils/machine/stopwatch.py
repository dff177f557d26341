"""How long the stages of a validation take."""

from __future__ import annotations

from typing import Any

from tessera.utils.machine.accelerator import Accelerator


class Stopwatch:
    """Seconds that the device spends in each stage; measured without waiting for it."""

    STAGES = ("preparation", "inference", "nms")

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seconds = dict.fromkeys(self.STAGES, 0.0)
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def begin(self) -> None:
        """Start the first stage of a batch."""
        self._last = self._accelerator.record_event()

    def lap(self, stage: str) -> None:
        """Book the time since the last reading on `stage`."""
        before, self._last = self._last, self._accelerator.record_event()
        self._laps.append((stage, before, self._last))

    def add(self, stage: str, seconds: float) -> None:
        """Book time that the host spent."""
        self._seconds[stage] += seconds

    def seconds(self) -> dict[str, float]:
        """The totals, once the device has done what was measured."""
        for stage, start, end in self._laps:
            self._seconds[stage] += self._accelerator.seconds_between(start, end)
        self._laps.clear()
        return dict(self._seconds)
