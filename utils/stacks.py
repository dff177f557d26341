"""Where a process is: the stack of each of its threads, printed when SIGUSR2 asks for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

_END = b"\0"  # no signal's number


def answer_where() -> Callable[[], None]:
    """From now on SIGUSR2 to this process prints the stack of each of its threads, and the process goes on.

    A thread of its own answers, so the answer also comes while the main thread waits in a collective, which is where a
    job would hang. It reads the stacks while it holds the interpreter's lock: faulthandler, which reads them within the
    signal, can crash a process whose threads are at work. Code that keeps the lock to itself delays the answer.

    Does nothing without SIGUSR2 (Windows). A forked process has to call this too: until then its parent answers.

    Returns:
        Ends it; the signal is overheard afterwards. An interpreter that ends in order wants this: it ends daemon
        threads wherever they are, and some C++ code takes that ill.

    Raises:
        ValueError: called elsewhere than in the main thread.
    """
    if not hasattr(signal, "SIGUSR2"):
        return lambda: None
    asked, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)  # system calls of C code go on
    thread = threading.Thread(target=_answer, args=(asked,), name="where", daemon=True)
    thread.start()

    def end() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.set_blocking(wake, True)
        os.write(wake, _END)
        thread.join()
        os.close(wake)
        os.close(asked)

    return end


def _answer(asked: int) -> None:
    while _END not in (numbers := os.read(asked, 4096)):  # numbers of all signals that came
        if signal.SIGUSR2 in numbers:
            os.write(2, _stacks().encode())  # at once: other processes of the job print here too


def _stacks() -> str:
    """The stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()} is here:\n"]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts += [f'Thread "{names.get(ident, ident)}":\n', *traceback.format_stack(frame)]
    return "".join(parts)
