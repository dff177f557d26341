"""Signals: to stop (by Ctrl-C, a scheduler, its warning that time is nearly up, a terminal that closes), or to print.

Python handles signals in the main thread, between two of its own instructions. So a thread waits for them too, which
acts while the main thread is in a call of a library that does not return.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from tessera.utils.environment import Launch
from tessera.utils.errors import Interrupted
from tessera.utils.flags.json_output import answer

GRACE_S = 2.0  # for an end that has begun; cutting it off would leave loader workers and files behind
STUCK_S = 20.0  # for the main thread to come out of a library's call; a second signal asks for less patience
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # SIGUSR1: `#SBATCH --signal=USR1@120`
_END = b"\0"  # no signal's number
_PATIENCE_S = 5.0


class Interruption:
    """Turns the signals into an end of the run; a context manager, and the signals' handler inside it.

    At first a signal ends the run at once: it raises `Interrupted`, "Stopped by SIGTERM `when`.", in the main thread.
    After `defer` it is only noted in `requested`, for the training loop to save a checkpoint and end after the step. A
    second Ctrl-C always ends at once; while the run is ending already it has no effect, unless that takes long. Rank 0
    acknowledges the first signal with a line. Outside the main thread the signals stay as they are.
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
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # under nohup a closed terminal ends nothing
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, *error: object) -> None:
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
            _write_line(f"{signal.Signals(self.requested).name}: {how}.")

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
        """From now on end the run at once again; now where a signal has been noted: "Stopped by SIGTERM `when`."."""
        self._when, self._deferred = when, False
        if self.requested:
            raise self._end()

    def _end(self) -> Interrupted:
        self.begin_end()
        name = signal.Signals(self.requested).name
        return Interrupted(f"Stopped by {name}{' ' if self._when else ''}{self._when}.", self.requested)


def _write_line(text: str) -> None:
    """Write to stderr itself: a print may be under way, which a handler must not enter."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


@contextmanager
def signals_wait() -> Iterator[None]:
    """Inside, the signals that an `Interruption` handles wait; the first of them is handled at the end.

    For what has to be closed whole: the exception would leave the rest of it open, and be lost inside a `__del__`.
    """
    waiting: list[int] = []
    try:
        with _handled_by(lambda number, _: waiting.append(number)):
            yield
    finally:
        for first in waiting[:1]:
            signal.raise_signal(first)


def signals_end_at_once() -> AbstractContextManager[None]:
    """Inside, the signals that an `Interruption` handles end the process, as the system does it, with no message.

    For a call of a library that may never return nor release Python's lock, while there is nothing to be saved.
    """
    return _handled_by(signal.SIG_DFL)


@contextmanager
def _handled_by(other: Any) -> Iterator[None]:
    """Inside, another handler has the signals that an `Interruption` handles, where this thread may set handlers."""
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    found = {number: handler for number in numbers if isinstance(handler := signal.getsignal(number), Interruption)}
    for number in found:
        signal.signal(number, other)
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def ignore_sigterm_at_the_end() -> None:
    """From now on ignore SIGTERM, in a process whose signals an `Interruption` handles.

    torchrun sends SIGTERM to all ranks as soon as one is gone; one that is about to end too needs time to say why.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(signal.getsignal(signal.SIGTERM), Interruption):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def start_signal_thread(who: str) -> Callable[[], None]:
    """Start a thread that acts on signals at once, whatever the main thread is in.

    SIGUSR2 prints the stack of each thread of this process to stderr, under the name `who`, and the process continues:
    also while the main thread waits in a collective. The thread reads the stacks while it holds the interpreter's lock:
    faulthandler, which reads them within the signal handler, can crash a process with busy threads.

    A signal that an `Interruption` handles ends the process where the main thread does not come to handle it: some time
    after the signal, and sooner after another one. Where it is only noted, nothing is done: a step may take long.

    Does nothing outside the main thread, which alone may set handlers, and without a stderr. A forked process has to
    call this too: until then its parent acts instead.

    Returns:
        Ends the thread, before the interpreter does. SIGUSR2 is ignored afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or sys.__stderr__ is None:
        return lambda: None
    (asked, wake), to = os.pipe(), os.dup(sys.__stderr__.fileno())
    os.set_blocking(wake, False)
    wake_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)  # system calls of C code continue
    thread = threading.Thread(target=_act_on_signals, args=(who, asked, to), name="signals", daemon=True)
    thread.start()

    def end() -> None:
        signal.signal(signal.SIGUSR2, handler_before if callable(handler_before) else signal.SIG_IGN)
        signal.set_wakeup_fd(wake_before)
        os.set_blocking(wake, True)
        os.write(wake, _END)
        thread.join(_PATIENCE_S)
        if not thread.is_alive():  # else it may still write
            for descriptor in (wake, asked, to):
                os.close(descriptor)

    return end


def _act_on_signals(who: str, asked: int, to: int) -> None:
    patience_s = STUCK_S
    while _END not in (numbers := os.read(asked, 4096)):  # numbers of all signals that came
        for number in numbers:
            if isinstance(handler := signal.getsignal(number), Interruption):  # not SIGCHLD, of a worker that ends
                timer = threading.Timer(patience_s, _end_if_stuck, (number, handler))
                timer.daemon = True
                timer.start()
                patience_s = GRACE_S
        if signal.SIGUSR2 in numbers:
            with contextlib.suppress(OSError):  # nobody reads stderr
                os.write(to, _stacks(who).encode(errors="backslashreplace"))  # at once: other processes print there too


def _end_if_stuck(number: int, handler: Interruption) -> None:
    if not handler.asked() and not handler._deferred and signal.getsignal(number) is handler:
        name = signal.Signals(number).name
        _write_line(f"{name}: ended in the middle of a call that does not return.")
        answer.fail(Interrupted.kind, f"Stopped by {name}.", 128 + number)
        os._exit(128 + number)


def _stacks(who: str) -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"{who} (process {os.getpid()}) is here:\n"]
    collects = gc.isenabled()
    gc.disable()  # Python 3.11 might collect garbage while it lists the frames, when it must not
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    for ident, frame in frames.items():
        if ident != threading.get_ident():
            parts += [f'Thread "{names.get(ident, ident)}":\n', *traceback.format_stack(frame)]
    return "".join([*parts, f"{who} (process {os.getpid()}) continues\n"])
