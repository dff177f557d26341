"""A job that fails says why once: the first rank to fail reports it, the others end silently."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import Store

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, Interrupted, UserError, explained, leave_the_report_to_rank_0
from tessera.utils.ranks.signals import EndWhereStuck, Interruption
from tessera.utils.ranks.stack_dumps import print_stacks_on_signal

T = TypeVar("T")

_KEY = "failure"


class PeerError(UserError):
    """Another rank failed and reports it; this rank ends silently, with the same exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FirstFailure(NamedTuple):
    """The first failure of a job.

    Attributes:
        reporter: who reports it: "rank 1", or "heartbeat 1" for that rank's heartbeat thread.
        exit_code: of all ranks.
    """

    reporter: str
    exit_code: int

    @property
    def rank(self) -> int:
        """The rank that reports it."""
        return int(self.reporter.split()[-1])

    def claim(self, store: Store) -> FirstFailure:
        """Become the job's first failure, unless there is one; return the one that is first.

        Raises:
            RuntimeError, OSError: the store is gone.
        """
        mine = f"{self.reporter}|{self.exit_code}"
        return FirstFailure.decode(store.compare_set(_KEY, "", mine))

    @classmethod
    def decode(cls, line: bytes) -> FirstFailure:
        """From what the store holds."""
        reporter, exit_code = line.decode().split("|")
        return cls(reporter, int(exit_code))

    @classmethod
    def read(cls, store: Store) -> FirstFailure | None:
        """The first failure so far; None where no rank has failed.

        Raises:
            RuntimeError, OSError: the store is gone.
        """
        return cls.decode(store.get(_KEY)) if store.check([_KEY]) else None


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
        return error.exit_code, None
    prefix = f"rank {launch.rank}: " if launch.size > 1 else ""
    end_answers = print_stacks_on_signal(f"rank {launch.rank}", EndWhereStuck())
    try:
        with Interruption():
            return 0, body()
    except PeerError as error:
        return error.exit_code, None
    except (UserError, Interrupted) as error:
        # Without a reporter every rank has met the same mistake, and rank 0 reports it.
        if launch.rank == (error.reporter or 0):
            label = "" if isinstance(error, Interrupted) else f"{prefix}error: "
            print(f"{label}{error}", file=sys.stderr, flush=True)
        elif error.reporter is None and isinstance(error, UserError):
            leave_the_report_to_rank_0()
            print(f"{prefix}error: {error}", file=sys.stderr, flush=True)  # the job goes on: rank 0 has not met it
        return error.exit_code, None
    except KeyboardInterrupt:
        if launch.rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return 130, None
    except Exception as error:
        mistake = explained(error)
        text = f"error: {mistake}" if mistake else "".join(traceback.format_exception(error))
        print(f"{prefix}{text}", file=sys.stderr, flush=True)
        return 1, None
    finally:
        end_answers()
