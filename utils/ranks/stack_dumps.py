"""Where a process is: the stack of each of its threads, printed when SIGUSR2 asks for it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

_END = b"\0"  # no signal's number
_PATIENCE_S = 5.0


def answer_where(who: str) -> Callable[[], None]:
    """From now on SIGUSR2 to this process prints the stack of each of its threads to stderr, and the process goes on.

    A thread of its own answers, so the answer also comes while the main thread waits in a collective, which is where a
    job would hang. It reads the stacks while it holds the interpreter's lock: faulthandler, which reads them within the
    signal, can crash a process whose threads are at work. Code that keeps the lock to itself delays the answer.

    Does nothing outside the main thread, which alone may set handlers, without SIGUSR2 (Windows), and without a stderr.
    A forked process has to call this too: until then its parent answers.

    Args:
        who: the process's part in the job, which heads the answer.

    Returns:
        Ends it, so that this thread is gone before the interpreter is. The signal is overheard afterwards.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGUSR2") or sys.__stderr__ is None:
        return lambda: None
    asked, wake = os.pipe()
    os.set_blocking(wake, False)
    wake_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)  # system calls of C code go on
    thread = threading.Thread(target=_answer, args=(who, asked, sys.__stderr__.fileno()), name="where", daemon=True)
    thread.start()

    def end() -> None:
        signal.signal(signal.SIGUSR2, handler_before if callable(handler_before) else signal.SIG_IGN)
        signal.set_wakeup_fd(wake_before)
        os.set_blocking(wake, True)
        os.write(wake, _END)
        thread.join(_PATIENCE_S)
        if not thread.is_alive():  # else nobody reads what it has begun to say
            os.close(wake)
            os.close(asked)

    return end


def _answer(who: str, asked: int, to: int) -> None:
    while _END not in (numbers := os.read(asked, 4096)):  # numbers of all signals that came
        if signal.SIGUSR2 in numbers:
            with contextlib.suppress(OSError):  # nobody listens
                os.write(to, _stacks(who).encode(errors="backslashreplace"))  # at once: other processes print there too


def _stacks(who: str) -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"{who} (process {os.getpid()}) is here:\n"]
    for ident, frame in _frames().items():
        if ident != threading.get_ident():
            parts += [f'Thread "{names.get(ident, ident)}":\n', *traceback.format_stack(frame)]
    return "".join([*parts, f"{who} (process {os.getpid()}) goes on\n"])


def _frames() -> dict[int, FrameType]:
    """The frame of each thread. Python 3.10 and 3.11 might collect garbage in there, at a moment when they must not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
