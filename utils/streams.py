"""stdout and stderr that cannot end a run: what is printed to a full disk or a closed pipe is lost, with a warning.

A pipe that does not block is full only for a moment: what is printed then is lost, what comes later is not.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_PIPE = 1 << 16  # bytes that a pipe holds


class LastingStream:
    """A text stream whose first failed write, unless it would have blocked, sends all from there to the null device.

    The warning, which has the name of the stream, goes to the other one.
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except BlockingIOError:
            return len(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Write what is kept back, or drop it; where the pipe is full, keep it."""
        try:
            self._stream.flush()
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        with contextlib.suppress(OSError):  # of the two, the last one that was left
            self._other.write(
                f"WARNING: {self._name}: {error.strerror}; what is printed there is lost from here on, the run "
                "continues. Its folder has all results.\n"
            )
            self._other.flush()


@contextmanager
def words_of_libraries(known: re.Pattern[bytes]) -> Iterator[list[str]]:
    """Lines that C code prints to stderr inside and that begin as `known`, instead of printing them.

    They are there when the block ends; all others are printed then, whoever they are of. The descriptor is the
    process's: only for one whose other threads have little to print, such as a loader worker.
    """
    words: list[str] = []
    printed, reader, writer = os.dup(2), *os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)  # who prints more than a pipe holds is cut short
    os.dup2(writer, 2)
    try:
        yield words
    finally:
        os.dup2(printed, 2)
        with contextlib.suppress(OSError):  # nothing was printed, or nobody reads stderr
            lines = os.read(reader, _PIPE).splitlines(keepends=True)
            words += [line.decode(errors="replace").rstrip() for line in lines if known.match(line)]
            os.write(2, b"".join(line for line in lines if not known.match(line)))
        for descriptor in (printed, reader, writer):
            os.close(descriptor)


def keep_streams() -> None:
    """Let stdout and stderr last as long as this process; call it before it opens anything.

    A closed one becomes the null device: else the next file that is opened, such as a checkpoint, would take its
    number, and get what C libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that its encoding does not have ends nothing
    out, err = (stream or os.fdopen(number, "w") for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    sys.stdout, sys.stderr = LastingStream(out, "stdout", err), LastingStream(err, "stderr", out)
