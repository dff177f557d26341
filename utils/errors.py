"""Exceptions with a message for the user, their exit codes, and explanations of torch's exceptions.

A `UserError` is printed without a traceback. Every other exception is a bug and keeps its traceback, except those
that `explain_exception` knows.
"""

from __future__ import annotations

import difflib
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tessera.utils.text import escape_control

log = logging.getLogger(__name__)

# A launcher ends all ranks when the first one ends, which must not be one that has printed nothing. So after a mistake
# that rank 0 sees and prints too, other ranks wait so many seconds.
REPORT_S = 10.0


class UserError(ValueError):
    """A mistake in the user's data, files or folders; exit code 1. Control characters in the message are escaped.

    Attributes:
        reporter: rank that prints it; None = rank 0, since every rank sees the same mistake.
        details: plain values that `--json` prints beside the message.
    """

    kind = "failed"  # for `--json`
    exit_code = 1

    def __init__(self, message: str, *, reporter: int | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(escape_control(message))
        self.reporter, self.details = reporter, details

    def reported_by(self, rank: int) -> UserError:
        """Return an equal error that only `rank` prints."""
        return type(self)(str(self), reporter=rank, details=self.details)


class ConfigError(UserError):
    """A mistake in flags, hyperparameters or a configuration YAML; exit code 2."""

    kind = "flags"
    exit_code = 2


class Diverged(UserError):
    """A loss that was not finite for many steps in a row."""


class Interrupted(KeyboardInterrupt):
    """A stop by a signal, which `except Exception` does not catch.

    Attributes:
        exit_code: 128 + the signal, as in a shell.
        saved: all ranks stop together, after their checkpoint was written.
        kind, details, reporter: as in UserError.
    """

    kind = "interrupted"
    details = None

    def __init__(self, message: str, number: int, *, saved: bool = False, reporter: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
        self.saved, self.reporter = saved, reporter
        self._number = number

    def reported_by(self, rank: int) -> Interrupted:
        """Return an equal error that only `rank` prints."""
        return type(self)(str(self), self._number, saved=self.saved, reporter=rank)


def with_notes(error: BaseException, message: str) -> str:
    """Return a message for `error`, with the notes of it and of its causes as further lines."""
    link: BaseException | None = error
    while link is not None:
        message = "\n".join([message, *getattr(link, "__notes__", ())])
        link = link.__cause__ or link.__context__
    return message


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with `error`."""
    return error.exit_code if isinstance(error, (UserError, Interrupted)) else 1


# The second message comes from torch's thread that copies batches to page-locked memory.
_LOST_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))?,? [\d, ]+\).*|Pin memory thread exited unexpectedly")
_COMPILERS = ("torch._dynamo", "torch._inductor")
# Pattern in an exception's message → message for the user; {found} is the match, {message} the exception's, shortened.
_EXPLANATIONS = {
    re.compile("Too many open files"): "too many open files: the limit of this process is reached. Raise it "
    "(ulimit -n 4096), or use fewer --workers.",
    re.compile(
        r"failed to map segment|can't start new thread|can't allocate memory|Cannot allocate memory|Unable to allocate"
        r"|std::bad_alloc|^MemoryError"
    ): "the system gives this process no more memory or threads ({message}). Raise its limits (ulimit -v, ulimit -u, "
    "those of its container), or use fewer --workers and a smaller batch.",
    re.compile(r"torchvision/_C\S*: "): "torchvision's compiled part was not loaded ({message}): it was built for "
    "another torch than this one. Install matching versions (uv sync, or pip install --upgrade torch torchvision).",
    re.compile(
        r"^[^,]* does not have a deterministic implementation"
    ): "--deterministic: {found} on this device. Leave --deterministic out, or use --device cpu.",
}


def lost_worker_error(found: str) -> UserError:
    """Return the error for a loader worker that ended too soon."""
    return UserError(
        f"a loader worker is gone ({found}). If memory or /dev/shm ran out, dmesg reports it: use fewer --workers or a "
        "smaller batch."
    )


def explain_exception(error: BaseException) -> UserError | None:
    """Return the user's error behind an exception of torch, or behind one of its causes; None for a bug."""
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if isinstance(link, MemoryError):
            text = f"MemoryError: {text}" if text else "MemoryError"
        for pattern, explanation in _EXPLANATIONS.items():
            if found := pattern.search(text):
                message = textwrap.shorten(text, 150, placeholder=" …")
                return UserError(explanation.format(message=message, found=found[0]))
        if lost := _LOST_WORKER.search(text):  # torch raises it wherever the rank is
            return lost_worker_error(lost[0].rstrip(". "))
        if type(link).__module__.startswith(_COMPILERS):
            message = textwrap.shorten(text, 600, placeholder=" …")
            return UserError(f"--compile: the compiler failed: {message} Leave --compile out, or fix what it names.")
        link = link.__cause__ or link.__context__
    return None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest other choice, first one that differs only in case; else ""."""
    others = [choice for choice in choices if choice != word]
    same = [choice for choice in others if choice.casefold() == word.casefold()]
    close = same or difflib.get_close_matches(word[:100], others, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Turn an error into a warning that names `what`: for plots and the like, which must not end a run."""
    try:
        yield
    except Exception as error:
        log.warning("%s: failed, the run continues without it (%s: %s)", what, type(error).__name__, error)


UTF_16 = "the text is UTF-16, expected UTF-8. Save it as UTF-8"
LFS_POINTER = "it is a git-lfs pointer, and not the file itself; run `git lfs pull` in its repository"


def is_lfs_pointer(head: bytes) -> bool:
    """Return whether a file that starts with `head` is a pointer to a file that git-lfs has not fetched."""
    return head.startswith(b"version https://git-lfs")
