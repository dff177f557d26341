"""Running a command on a rank to its exit code; of a job's failures only the first one is printed."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, Interrupted, UserError, explain_exception, rank_0_reports, with_notes
from tessera.utils.flags.json_output import answer, json_output_of
from tessera.utils.flags.options import Options
from tessera.utils.ranks.signals import StopSignals, start_signal_thread
from tessera.utils.ranks.store import read
from tessera.utils.text import first_line

T = TypeVar("T")

_KEY = "failure"
_PRINTING_S = 5.0


class PeerError(UserError):
    """An error that rank `reporter` reports; this rank ends silently with the same exit code."""

    kind = "rank"

    def __init__(self, message: str, exit_code: int = 1, reporter: int = 0) -> None:
        super().__init__(message, reporter=reporter)
        self.exit_code = exit_code


class FirstFailure(NamedTuple):
    """The first failure of a job. Its methods raise RuntimeError or OSError without a reachable store."""

    reporter: str  # "rank 1", or "heartbeat 1" for that rank's heartbeat thread
    exit_code: int  # of all ranks

    @property
    def rank(self) -> int:
        """The rank that reports it."""
        return int(self.reporter.split()[-1])

    def claim(self, store: Store) -> FirstFailure:
        """Record this as the job's first failure, unless there is one; return the recorded one."""
        return FirstFailure(*json.loads(store.compare_set(_KEY, "", json.dumps(self))))

    @classmethod
    def read(cls, store: Store) -> FirstFailure | None:
        """Return the recorded failure; None where no rank has failed."""
        line = read(store, _KEY)
        return None if line is None else cls(*json.loads(line))


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

    Meanwhile SIGTERM, Ctrl-C and SIGUSR1 end the rank with a message. SIGUSR2 to this process or to a loader worker
    prints the stacks of its threads.

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
    end_signal_thread = start_signal_thread(f"rank {launch.rank}")
    try:
        with StopSignals():
            return 0, body()
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, launch), None
    finally:
        end_signal_thread()


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
            rank_0_reports()  # ends this process, unless rank 0 does not see the mistake
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
