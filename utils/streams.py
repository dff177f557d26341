"""stdout and stderr that tolerate full disks and closed pipes, and capture of what C libraries print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tessera.utils.text import escape_control

_PIPE_BYTES = 1 << 16


class FaultTolerantStream:
    """A text stream that switches to the null device after a failed write, with a warning on the other stream."""

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write, or drop the text."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it; keep it while a non-blocking pipe is full."""
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., object], *args: str) -> None:
        try:
            call(*args)
        except BlockingIOError:
            return  # a non-blocking pipe is full only for a moment
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            with contextlib.suppress(OSError):  # both streams fail
                self._other.write(
                    f"WARNING: {self._name}: {error.strerror}; its output is lost from here on. The run continues, and "
                    "its directory has all results.\n"
                )
                self._other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def capture_library_output(known: re.Pattern[bytes]) -> Iterator[list[str]]:
    """Capture the lines that C code prints to stderr and that match `known`; the list is filled at the end.

    All other lines are printed at the end, with control characters escaped, as a name in a file may have some. The
    descriptor belongs to the whole process, so use this only where other threads print little, such as in a loader
    worker.
    """
    captured: list[str] = []
    stderr, reader, writer = os.dup(2), *os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)  # more than the pipe holds is dropped
    os.dup2(writer, 2)
    try:
        yield captured
    finally:
        os.dup2(stderr, 2)
        with contextlib.suppress(OSError):  # nothing was printed, or stderr fails
            lines = os.read(reader, _PIPE_BYTES).splitlines(keepends=True)
            captured += [line.decode(errors="replace").rstrip() for line in lines if known.match(line)]
            others = b"".join(line for line in lines if not known.match(line))
            os.write(2, escape_control(others.decode(errors="backslashreplace")).encode())
        for descriptor in (stderr, reader, writer):
            os.close(descriptor)


def protect_streams() -> None:
    """Make stdout and stderr tolerate errors; call this before the process opens a file.

    A closed stream becomes the null device. Otherwise the next opened file, such as a checkpoint, would get its
    descriptor, and with it what C libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for file names that its encoding lacks
    out, err = (stream or os.fdopen(number, "w") for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    sys.stdout, sys.stderr = FaultTolerantStream(out, "stdout", err), FaultTolerantStream(err, "stderr", out)
