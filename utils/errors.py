"""Errors that a user can fix.

A `UserError` carries one complete message: where, what was found, what was expected, the remedy. The scripts print it
without a traceback and exit with its code; every other exception is a defect of the program and keeps its traceback,
but for those of torch that `explained` knows.
"""

from __future__ import annotations

import difflib
import logging
import re
import signal
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tessera.utils.text import printable

log = logging.getLogger(__name__)

_REPORT_S = 10.0  # seconds that a launcher leaves rank 0 to report


class UserError(ValueError):
    """A mistake in what the user gave: data, files, folders. The scripts exit with code 1.

    The message may hold names of files: its control characters become escapes.

    Attributes:
        reporter: the rank that reports it; None where every rank sees the same mistake, and rank 0 reports it.
        details: plain values that `--json` prints beside the message.
    """

    kind = "failed"  # for `--json`
    exit_code = 1

    def __init__(self, message: str, *, reporter: int | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(printable(message))
        self.reporter, self.details = reporter, details

    def reported_by(self, rank: int) -> UserError:
        """The same mistake, which `rank` alone reports."""
        return type(self)(str(self), reporter=rank, details=self.details)


class ConfigError(UserError):
    """A mistake in flags, hyperparameters or a configuration YAML. The scripts exit with code 2."""

    kind = "flags"
    exit_code = 2


class Diverged(UserError):
    """The loss has not been finite for many steps in a row."""


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal: no failure. No `except Exception` catches it.

    Attributes:
        exit_code: 128 + the signal, as in a shell.
        saved: all ranks stop together, after their checkpoint was written.
        kind, details, reporter: as in UserError.
    """

    kind = "interrupted"
    details = None

    def __init__(self, message: str, number: int, *, saved: bool = False, reporter: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = 128 + (number or signal.SIGTERM)
        self.saved, self.reporter = saved, reporter
        self._number = number

    def reported_by(self, rank: int) -> Interrupted:
        """The same end, which `rank` alone reports."""
        return type(self)(str(self), self._number, saved=self.saved, reporter=rank)


def leave_the_report_to_rank_0() -> None:
    """Wait, on another rank, for the launcher to end this process, where all ranks see the same mistake.

    A launcher ends all ranks when the first one has ended: that must not be one that has reported nothing. Returns
    where nobody ends this process for some seconds.
    """
    time.sleep(_REPORT_S)


def exit_code_of(error: BaseException) -> int:
    """Exit code of a process that ends with `error`."""
    return error.exit_code if isinstance(error, (UserError, Interrupted)) else 1


# The second where a worker died with a batch ready, and a thread of torch's copies batches to page-locked memory.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))?,? [\d, ]+\).*|Pin memory thread exited unexpectedly")
_COMPILERS = ("torch._dynamo", "torch._inductor")
# What a message holds → the user's error, with what was found, or the whole message in up to 150 characters.
_EXPLANATIONS = {
    re.compile("Too many open files"): "too many open files: the limit of this process is reached. Raise it "
    "(ulimit -n 4096), or use fewer --workers.",
    re.compile(
        r"failed to map segment|can't start new thread|can't allocate memory|Cannot allocate memory|Unable to allocate"
        r"|std::bad_alloc|^MemoryError"
    ): "the system gives this process no more memory or threads ({said}). See its limits (ulimit -v, ulimit -u, those "
    "of its container), or use fewer --workers and a smaller batch.",
    # Its import hides what the loader of libraries said.
    re.compile(r"operator torchvision::\w+ does not exist"): "torchvision's compiled part was not loaded ({said}): it "
    "was built for another torch than this one, or the process may take no more memory (ulimit -v). Install the two "
    "that belong together (uv sync, or pip install --upgrade torch torchvision).",
    re.compile(
        r"^[^,]* does not have a deterministic implementation"
    ): "--deterministic: {found} on this device. Leave --deterministic out, or use --device cpu.",
}


def lost_worker(found: str) -> UserError:
    """The error for a loader worker that ended too soon."""
    return UserError(
        f"a loader worker is gone ({found}). Where memory or /dev/shm ran out, dmesg reports it: use fewer --workers "
        f"or a smaller batch. Resume a training from its last checkpoint with --resume."
    )


def explained(error: BaseException) -> UserError | None:
    """The user's error that an exception of torch stands for, or one that led to it; None where it is a defect.

    torch raises the end of a lost worker at whatever the rank is doing.
    """
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if isinstance(link, MemoryError):
            text = f"MemoryError: {text}" if text else "MemoryError"
        for pattern, told in _EXPLANATIONS.items():
            if found := pattern.search(text):
                said = textwrap.shorten(text, 150, placeholder=" …")
                return UserError(told.format(said=said, found=found[0]))
        if lost := _LOST_WORKER.search(text):
            return lost_worker(lost[0].rstrip(". "))
        if type(link).__module__.startswith(_COMPILERS):
            said = textwrap.shorten(text, 600, placeholder=" …")
            return UserError(f"--compile: the compiler failed: {said} Leave --compile out, or fix what it names.")
        link = link.__cause__ or link.__context__
    return None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `choices` but `word` itself, or "" where none is close.

    One that differs by case alone is the closest.
    """
    others = [choice for choice in choices if choice != word]
    same = [choice for choice in others if choice.casefold() == word.casefold()]
    close = same or difflib.get_close_matches(word[:100], others, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


@contextmanager
def tolerate(what: str) -> Iterator[None]:
    """Turn an error into a warning that names `what`: for pictures and the like, which must not end a run."""
    try:
        yield
    except Exception as error:
        log.warning("%s: failed, the run continues without it (%s: %s)", what, type(error).__name__, error)


UTF_16 = "the text is UTF-16, expected UTF-8. Save it as UTF-8"
LFS_POINTER = "it is a git-lfs pointer, and not the file itself; run `git lfs pull` in its repository"


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins so stands for one that git-lfs has not fetched."""
    return head.startswith(b"version https://git-lfs")
