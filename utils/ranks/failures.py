"""Running a command on a rank to its exit code: failures, of which a job prints the first one, and signals.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP stop a run, SIGUSR2 prints the stacks of all threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from tessera.utils.environment import Launch
from tessera.utils.errors import REPORT_S, ConfigError, Interrupted, UserError, explain_exception, with_notes
from tessera.utils.flags.json_output import answer, json_output_of
from tessera.utils.flags.options import Options
from tessera.utils.text import first_line

T = TypeVar("T")

GRACE_S = 2.0  # for a shutdown in progress, which removes loader workers and files
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # SIGUSR1: `#SBATCH --signal=USR1@120`
_PRINTING_S = 5.0


class PeerError(UserError):
    """An error that rank `reporter` reports; this rank ends silently with the same exit code."""

    kind = "rank"

    def __init__(self, message: str, exit_code: int = 1, reporter: int = 0) -> None:
        super().__init__(message, reporter=reporter)
        self.exit_code = exit_code


class Result(Protocol):
    """The result of a command."""

    @property
    def exit_code(self) -> int:
        """Of the process."""

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values with the keys of docs/json.md; on rank 0."""


def run_command(options: type[Options], argv: Sequence[str], start: Callable[[dict[str, Any]], Result | None]) -> int:
    """Run the command line of one rank and return the exit code; with `--json` print the result or the failure.

    `start` runs the command with the parsed flags; it returns None on a rank without a result.
    """
    if not gc.isenabled():  # since `check_command_line`
        gc.freeze()
        gc.enable()
    with json_output_of(options.program, argv):
        code, result = run_rank(lambda: start(options.from_args(argv)))
        if result is not None:
            code = result.exit_code
            if answer.wanted:
                answer.give(result.as_dict(), code)
        return code


def run_rank(body: Callable[[], T]) -> tuple[int, T | None]:
    """Run `body` on one rank; report a failure once for the whole job.

    Returns:
        The exit code, and the result of `body` (None after a failure). A UserError, or an error that
        `explain_exception` knows, is printed as one message, any other exception with its traceback.
    """
    try:
        launch = Launch.from_environment()
    except ConfigError as error:
        return _report(error, Launch()), None
    if launch.rank:
        answer.leave_to_rank_0()
    print_stacks_on_sigusr2()
    try:
        with StopSignals():
            return 0, body()
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, launch), None


def _report(caught: Exception | KeyboardInterrupt, launch: Launch) -> int:
    """Print a failure if this rank reports it; return the exit code."""
    prefix = f"rank {launch.rank}: " if launch.size > 1 else ""
    if isinstance(caught, (UserError, Interrupted)):
        error = caught
    elif isinstance(caught, KeyboardInterrupt):
        error = Interrupted("interrupted", signal.SIGINT)
    elif known := explain_exception(caught):
        error = known.reported_by(launch.rank)
    else:
        print(prefix + "".join(traceback.format_exception(caught)), file=sys.stderr, flush=True)
        answer.fail("bug", first_line(caught), 1)
        return 1
    message = with_notes(caught, str(error))
    answer.fail(error.kind, message, error.exit_code, error.details)
    # A mistake that every rank may see, such as a wrong flag, has no reporter: rank 0 prints it.
    is_reporter = launch.rank == (error.reporter or 0)
    if isinstance(error, UserError) and not isinstance(error, PeerError) and (is_reporter or error.reporter is None):
        if not is_reporter:
            time.sleep(REPORT_S)  # rank 0's report ends this process, unless rank 0 does not see the mistake
        print(f"{prefix}error: {message}", file=sys.stderr, flush=True)
    elif isinstance(error, Interrupted) and is_reporter:
        print(message, file=sys.stderr, flush=True)
    return error.exit_code


def exit_immediately(rank: int, message: str, exit_code: int) -> None:
    """Print `message`, if there is one, and end this process immediately, whatever its other threads do."""
    if message:
        print_nonblocking(f"rank {rank}: error: {message}")
    answer.fail(UserError.kind if message else PeerError.kind, message or "another rank reports the failure", exit_code)
    os._exit(exit_code)


def print_nonblocking(line: str) -> None:
    """Print a line to stderr from another thread, since writing to a pipe that nobody reads blocks."""
    thread = threading.Thread(target=lambda: print(line, file=sys.stderr, flush=True), daemon=True)
    thread.start()
    thread.join(_PRINTING_S)


class StopSignals:
    """Signal handler that stops the run; a context manager that installs itself.

    At first a signal raises `Interrupted`, "Stopped by SIGTERM `when`.", in the main thread. After `defer` it is only
    stored in `requested`, so that the training loop saves a checkpoint and stops after the step. A second Ctrl-C raises
    `Interrupted`; during a shutdown it is ignored for GRACE_S seconds. Rank 0 prints a line for the first signal.
    Outside the main thread no handler is installed.
    """

    def __init__(self, when: str = "") -> None:
        self.requested = 0
        self._when, self._deferred = when, False
        self._process = os.getpid()
        self._is_main = Launch.from_environment().rank == 0
        self._ending_since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if isinstance(handler, StopSignals):
                handler.requested = handler.requested or self.requested  # a second signal must not disturb the shutdown
                handler._ending_since = self._ending_since
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle signal `number`."""
        if os.getpid() != self._process:
            return  # a forked worker: its rank handles the signal
        if self.requested:
            is_ending = self._ending_since is not None and time.monotonic() - self._ending_since < GRACE_S
            if number == signal.SIGINT and not is_ending:
                self._begin_shutdown(number)
                raise Interrupted("Ended immediately by Ctrl-C.", number)
            return
        self.requested = number
        if self._is_main:  # no promise of a checkpoint: after a lost rank, when launchers send SIGTERM, there is none
            how = "stopping soon; Ctrl-C ends immediately" if self._deferred else "stopping"
            _write_line(f"{signal.Signals(number).name}: {how}.")
        if not self._deferred:
            raise self._end()

    def take(self, requested: Iterable[int]) -> int:
        """Start the shutdown for one of the signals that the ranks have received, 0 = none, by rank; return it.

        It is that of the lowest rank. SIGTERM counts last: launchers send it to all ranks after another signal.
        """
        self._begin_shutdown(
            next((number for number in requested if number not in (0, signal.SIGTERM)), signal.SIGTERM)
        )
        return self.requested

    def _begin_shutdown(self, number: int) -> None:
        """Ignore other signals from now on, and Ctrl-C for GRACE_S seconds."""
        self.requested, self._ending_since = number, time.monotonic()

    def stop_requested(self) -> bool:
        """Return whether a signal has come."""
        return self.requested > 0

    def defer(self) -> None:
        """Only store signals from now on."""
        self._deferred = True

    def stop_immediately(self, when: str) -> None:
        """Stop immediately on signals from now on, and now if one is stored: "Stopped by SIGTERM `when`."."""
        self._when, self._deferred = when, False
        if self.requested:
            raise self._end()

    def _end(self) -> Interrupted:
        self._begin_shutdown(self.requested)
        name = signal.Signals(self.requested).name
        return Interrupted(f"Stopped by {name}{' ' if self._when else ''}{self._when}.", self.requested)


def _write_line(text: str) -> None:
    """Write to the descriptor of stderr: a signal handler must not enter a print in progress."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay the signals that a `StopSignals` handles to the end of the body, where the first is raised again.

    For cleanup that must complete: the exception would leave the rest open, and be lost inside a `__del__`.
    """
    waiting: list[int] = []
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if isinstance(handler := signal.getsignal(number), StopSignals)}
    for number in before:
        signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in waiting[:1]:
            signal.raise_signal(first)


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on, in a process whose signals a `StopSignals` handles.

    torchrun sends SIGTERM to all ranks when one is gone; a rank that is about to end needs time to report why.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(signal.getsignal(signal.SIGTERM), StopSignals):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def print_stacks_on_sigusr2() -> None:
    """Let SIGUSR2 print the stacks of all threads to stderr, also while the main thread is in a library call."""
    faulthandler.register(signal.SIGUSR2, os.dup(2))  # a library's output may be captured meanwhile
