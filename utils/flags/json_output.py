"""`--json`: one JSON object on stdout, everything else on stderr. docs/json.md lists its keys."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tessera.utils.flags.version import __version__
from tessera.utils.text import strict_json

FLAG = "--json"
SCHEMA = 1  # raised if a key changes its meaning or goes


def headed(program: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of a command with its schema and version first."""
    return {"schema": f"tessera.{program.removesuffix('.py')}/{SCHEMA}", "version": __version__, **values}


class JsonOutput:
    """The JSON object of this process; without `--json` it does nothing.

    From `open` on, all other output to stdout goes to stderr, also that of libraries and child processes.
    """

    def __init__(self) -> None:
        self._program, self._began = "", 0.0
        self._stdout: int | None = None  # None: not open, or another rank prints
        self._giving = threading.Lock()  # stays locked once an object was printed

    def open(self, program: str, argv: Sequence[str]) -> bool:
        """Take over stdout if the command line has `--json`; return whether this call did.

        The flag counts even if other arguments are wrong.
        """
        if self._program or FLAG not in argv:
            return False
        self._program, self._began = program, time.monotonic()
        sys.stdout.flush()
        self._stdout = self._kept = os.dup(1)
        os.dup2(2, 1)
        self._printed, sys.stdout = sys.stdout, sys.stderr  # keeps the order of lines
        return True

    @property
    def wanted(self) -> bool:
        """Whether this process prints an object."""
        return self._stdout is not None

    def leave_to_rank_0(self) -> None:
        """Print nothing, on ranks other than 0."""
        self._stdout = None

    def close(self) -> None:
        """Restore stdout, for a command called from Python."""
        sys.stdout = self._printed
        os.dup2(self._kept, 1)
        os.close(self._kept)
        self._program, self._stdout, self._giving = "", None, threading.Lock()

    def give(self, values: Mapping[str, Any], exit_code: int, error: Mapping[str, str] | None = None) -> None:
        """Print the object, unless one was printed already."""
        if self._stdout is None or not self._giving.acquire(blocking=False):  # a thread or signal handler was first
            return
        seconds = round(time.monotonic() - self._began, 3)
        ended = {"exit_code": exit_code, "error": error, "seconds": seconds}
        left = f"{strict_json(headed(self._program, {**ended, **values}))}\n".encode()
        try:
            while left:
                left = left[os.write(self._stdout, left) :]
        except OSError as failed:
            print(f"WARNING: {FLAG}: stdout: {failed.strerror}; the object is lost.", file=sys.stderr)

    def fail(self, kind: str, message: str, exit_code: int, details: Mapping[str, Any] | None = None) -> None:
        """Print the object of a failure, unless one was printed already."""
        self.give(details or {}, exit_code, {"kind": kind, "message": message})


answer = JsonOutput()  # a process has one stdout


@contextmanager
def json_output_of(program: str, argv: Sequence[str]) -> Iterator[None]:
    """Open `answer` within the context if `--json` is given, unless the process has opened it."""
    opened = answer.open(program, argv)
    try:
        yield
    finally:
        if opened:
            answer.close()
