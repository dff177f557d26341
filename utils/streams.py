"""stdout and stderr that cannot end a run: what is printed to a full disk or a closed pipe is lost, with a warning.

A pipe that does not block is full only for a moment: what is printed then is lost, what comes later is not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class LastingStream:
    """A text stream whose first failed write, unless it would have blocked, sends all from there to the null device.

    Args:
        stream: on a file descriptor.
        name: for the warning.
        other: gets the warning.
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
                f"WARNING: {self._name}: {error.strerror}; what is printed there is lost from here on, the run goes "
                "on. Its folder has all results.\n"
            )
            self._other.flush()


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
    out, err = (stream or os.fdopen(number, "w") for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    sys.stdout, sys.stderr = LastingStream(out, "stdout", err), LastingStream(err, "stderr", out)
