"""Being asked to stop: by Ctrl-C, by a scheduler, by a warning that the time is nearly up."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: `#SBATCH --signal=USR1@120`


class Interruption:
    """Turns the signals into a request that the training loop sees; a context manager.

    The first signal asks for a checkpoint and an orderly end. A second Ctrl-C ends at once.

    Attributes:
        requested: the first signal that came, 0 where none did.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or number
