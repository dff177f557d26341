"""Stack dumps: the stack of each thread of a process, printed when SIGUSR2 asks for it."""

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


def print_stacks_on_signal(who: str, heard: Callable[[int], None] = lambda _: None) -> Callable[[], None]:
    """From now on SIGUSR2 prints the stack of each thread of this process to stderr, and the process continues.

    The dumps go where stderr is now, also while `words_of_libraries` holds stderr back.

    A thread of its own prints, so the dump also comes while the main thread waits in a collective, which is where a job
    would hang. It reads the stacks while it holds the interpreter's lock: faulthandler, which reads them within the
    signal handler, can crash a process with busy threads. Code that never releases the lock delays the dump.

    Does nothing outside the main thread, which alone may set handlers, and without a stderr. A forked process has to
    call this too: until then its parent prints instead.

    Args:
        who: the process's part in the job, which heads the dump.
        heard: called in the same thread with the number of every other signal that Python handles, at once: the main
            thread handles it only after the library's call that it is in.

    Returns:
        Ends it, so that this thread is gone before the interpreter is. The signal is ignored afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or sys.__stderr__ is None:
        return lambda: None
    (asked, wake), to = os.pipe(), os.dup(sys.__stderr__.fileno())
    os.set_blocking(wake, False)
    wake_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    handler_before = signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)  # system calls of C code continue
    thread = threading.Thread(target=_print_when_asked, args=(who, heard, asked, to), name="stack dumps", daemon=True)
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


def _print_when_asked(who: str, heard: Callable[[int], None], asked: int, to: int) -> None:
    while _END not in (numbers := os.read(asked, 4096)):  # numbers of all signals that came
        for number in numbers:
            if number != signal.SIGUSR2:
                heard(number)
        if signal.SIGUSR2 in numbers:
            with contextlib.suppress(OSError):  # nobody reads stderr
                os.write(to, _stacks(who).encode(errors="backslashreplace"))  # at once: other processes print there too


def _stacks(who: str) -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"{who} (process {os.getpid()}) is here:\n"]
    for ident, frame in _frames().items():
        if ident != threading.get_ident():
            parts += [f'Thread "{names.get(ident, ident)}":\n', *traceback.format_stack(frame)]
    return "".join([*parts, f"{who} (process {os.getpid()}) continues\n"])


def _frames() -> dict[int, FrameType]:
    """The frame of each thread. Python 3.10 and 3.11 might collect garbage in there, at a moment when they must not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
