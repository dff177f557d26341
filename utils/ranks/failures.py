"""A job that fails says why once: the first rank to fail reports it, the others end silently."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, Interrupted, UserError, explained, leave_the_report_to_rank_0
from tessera.utils.flags.json_output import answer, answering
from tessera.utils.flags.options import Options
from tessera.utils.ranks.signals import Interruption, start_signal_thread
from tessera.utils.ranks.store import read
from tessera.utils.text import first_line

T = TypeVar("T")

_KEY = "failure"
_PRINTING_S = 5.0


class PeerError(UserError):
    """Another rank failed and reports it; this rank ends silently, with the same exit code."""

    kind = "rank"

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FirstFailure(NamedTuple):
    """The first failure of a job; its methods raise RuntimeError or OSError where the store is gone."""

    reporter: str  # "rank 1", or "heartbeat 1" for that rank's heartbeat thread
    exit_code: int  # of all ranks

    @property
    def rank(self) -> int:
        """The rank that reports it."""
        return int(self.reporter.split()[-1])

    def claim(self, store: Store) -> FirstFailure:
        """Become the job's first failure, unless there is one; return the one that is first."""
        return FirstFailure(*json.loads(store.compare_set(_KEY, "", json.dumps(self))))

    @classmethod
    def read(cls, store: Store) -> FirstFailure | None:
        """The first failure so far; None where no rank has failed."""
        line = read(store, _KEY)
        return None if line is None else cls(*json.loads(line))


class Result(Protocol):
    """What a command ends with."""

    @property
    def exit_code(self) -> int:
        """Of the process."""

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values with the keys of docs/json.md; on rank 0."""


def run_command(options: type[Options], argv: Sequence[str], start: Callable[[dict[str, Any]], Result | None]) -> int:
    """Run the command line of one rank and return the exit code. With `--json` the result is printed, or the failure.

    Args:
        options, argv: flags of the command, and its words.
        start: does what the flags ask for; returns None on a rank that does nothing.
    """
    if not gc.isenabled():  # since `check_command_line`
        gc.freeze()
        gc.enable()
    with answering(options.program, argv):
        code, result = run_rank(lambda: start(options.from_args(argv)))
        if result is not None:
            code = result.exit_code
            if answer.wanted:
                answer.give(result.as_dict(), code)
        return code


def run_rank(body: Callable[[], T]) -> tuple[int, T | None]:
    """Run one rank's program; report a failure once for the whole job.

    While it runs, SIGTERM, Ctrl-C and SIGUSR1 end it with a sentence, and SIGUSR2 to this process or to one of its
    loader workers prints the stack of each of its threads.

    Returns:
        The exit code, and the body's result (None after a failure). A user's mistake, and what `explained` knows, give
        one message; any other exception its traceback, for it is a defect.
    """
    try:
        launch = Launch.from_environment()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        answer.fail(error.kind, str(error), error.exit_code)
        return error.exit_code, None
    if launch.rank:
        answer.leave_to_rank_0()
    prefix = f"rank {launch.rank}: " if launch.size > 1 else ""
    end_signal_thread = start_signal_thread(f"rank {launch.rank}")
    try:
        with Interruption():
            return 0, body()
    except PeerError as error:
        answer.fail(error.kind, str(error), error.exit_code)
        return error.exit_code, None
    except (UserError, Interrupted) as error:
        answer.fail(error.kind, str(error), error.exit_code, error.details)
        # A mistake that every rank may have made, such as a wrong flag, names no reporter: rank 0 prints it.
        if launch.rank == (error.reporter or 0):
            label = "" if isinstance(error, Interrupted) else f"{prefix}error: "
            print(f"{label}{error}", file=sys.stderr, flush=True)
        elif error.reporter is None and isinstance(error, UserError):
            leave_the_report_to_rank_0()
            print(f"{prefix}error: {error}", file=sys.stderr, flush=True)  # nobody ended this rank: rank 0 made none
        return error.exit_code, None
    except KeyboardInterrupt:
        if launch.rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        answer.fail(Interrupted.kind, "interrupted", 130)
        return 130, None
    except Exception as error:
        mistake = explained(error)
        text = f"error: {mistake}" if mistake else "".join(traceback.format_exception(error))
        print(f"{prefix}{text}", file=sys.stderr, flush=True)
        answer.fail(*(("failed", str(mistake)) if mistake else ("defect", first_line(error))), 1)
        return 1, None
    finally:
        end_signal_thread()


def exit_at_once(rank: int, message: str, exit_code: int) -> None:
    """End this process at once, whatever its other threads do; print `message` before, if there is one."""
    if message:
        print_without_waiting(f"rank {rank}: error: {message}")
    answer.fail(UserError.kind if message else PeerError.kind, message or "another rank reports the failure", exit_code)
    os._exit(exit_code)


def print_without_waiting(line: str) -> None:
    """Print a line to stderr, from a thread of its own: nobody may read there, and this one has more to do."""
    thread = threading.Thread(target=lambda: print(line, file=sys.stderr, flush=True), daemon=True)
    thread.start()
    thread.join(_PRINTING_S)
