"""Being asked to stop: by Ctrl-C, by a scheduler, by a warning that the time is nearly up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from utils.environment import Launch
from utils.errors import Interrupted

GRACE_S = 2.0  # for an end that has begun; cutting it off would leave loader workers and files behind
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: `#SBATCH --signal=USR1@120`


class Interruption:
    """Turns the signals into an end of the run; a context manager, and the signals' handler inside it.

    At first a signal ends the run at once: it raises `Interrupted` in the main thread. After `defer` it is only noted,
    for the training loop to save a checkpoint and end after the step. A second Ctrl-C always ends at once; while the
    run is ending already it has no effect, unless that takes long. Rank 0 acknowledges the first signal with a line.

    Outside the main thread, where Python allows no handlers, the signals stay as they are.

    Args:
        when: end of the sentence "Stopped by SIGTERM …".

    Attributes:
        requested: the first signal that came, 0 where none did.
    """

    def __init__(self, when: str = "") -> None:
        self.requested = 0
        self._when, self._deferred = when, False
        self._process = os.getpid()
        self._is_main = Launch.from_environment().rank == 0
        self._ending_since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if isinstance(handler, Interruption):
                handler.requested = handler.requested or self.requested  # lest a second signal disturb the end
                handler._ending_since = self._ending_since
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle signal `number`."""
        if os.getpid() != self._process:
            return  # a worker that was forked just now: its rank decides
        if self.requested:
            is_ending = self._ending_since is not None and time.monotonic() - self._ending_since < GRACE_S
            if number == signal.SIGINT and not is_ending:
                self.begin_end()
                raise KeyboardInterrupt
            return
        self.requested = number
        self._acknowledge()
        if not self._deferred:
            raise self._end()

    def _acknowledge(self) -> None:
        # No promise of a checkpoint: launchers send SIGTERM too where a rank is gone, without which there is none.
        how = "stopping soon; Ctrl-C ends at once" if self._deferred else "stopping"
        if self._is_main:
            with contextlib.suppress(OSError):  # a print may be under way, which this must not enter
                os.write(2, f"\n{signal.Signals(self.requested).name}: {how}.\n".encode())

    def begin_end(self) -> None:
        """The run ends from now on: for a while, no other Ctrl-C cuts off what is being closed."""
        self._ending_since = time.monotonic()

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.requested > 0

    def defer(self) -> None:
        """From now on only note a signal."""
        self._deferred = True

    def act_at_once(self, when: str) -> None:
        """From now on end the run at once again, also where a signal has been noted.

        Args:
            when: end of the sentence "Stopped by SIGTERM …".

        Raises:
            Interrupted: a signal has been noted.
        """
        self._when, self._deferred = when, False
        if self.requested:
            raise self._end()

    def _end(self) -> Interrupted:
        self.begin_end()
        name = signal.Signals(self.requested).name
        return Interrupted(f"Stopped by {name}{' ' if self._when else ''}{self._when}.", self.requested)


def ignore_sigterm_at_the_end() -> None:
    """From now on ignore SIGTERM, in a process whose signals an `Interruption` handles.

    torchrun sends SIGTERM to all ranks as soon as one is gone; one that is about to end too needs time to say why.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(signal.getsignal(signal.SIGTERM), Interruption):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
