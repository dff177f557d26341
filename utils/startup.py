"""Start of a command before torch is imported: streams that tolerate errors, flags, `--help`, Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

from tessera.utils.environment import Launch, configure_command, max_pixels
from tessera.utils.errors import REPORT_S, ConfigError, Interrupted, UserError, explain_exception
from tessera.utils.files import NO_DIRECTORY, working_directory
from tessera.utils.flags.json_output import answer
from tessera.utils.flags.options import Options
from tessera.utils.text import first_line

INTERRUPTED = 128 + signal.SIGINT


def check_command_line(options: type[Options], check: Callable[[Any], object] | None = None) -> None:
    """Handle `--help` and wrong flags, which exit, before torch is imported; return if the flags are valid.

    A single process also calls `check`, whose ConfigError is reported like that of a flag. Until `run_command`, Ctrl-C
    ends the process without a traceback. Import errors that `explain_exception` knows are one message. Garbage
    collection is off, as imports make hundreds of thousands of lasting objects.
    """
    protect_streams()
    answer.open(options.program, sys.argv[1:])
    sys.excepthook = _print_mistake
    is_main, prefix = True, ""

    def leave(number: int, frame: FrameType | None) -> None:
        if is_main:
            os.write(2, b"interrupted\n")
        answer.fail(Interrupted.kind, "interrupted", INTERRUPTED)
        os._exit(INTERRUPTED)  # an exception would surface as an error of an import

    try:
        launch = Launch.from_environment()
        is_main, prefix = launch.rank == 0, f"rank {launch.rank}: " if launch.rank else ""
        if not is_main:
            answer.leave_to_rank_0()
        max_pixels()
        if working_directory() is None:  # torch's libraries would end the process
            raise ConfigError(NO_DIRECTORY)
        flags = options(**options.from_args(sys.argv[1:]))
        if is_main and (warning := options.warning(sys.argv[1:])):
            print(f"WARNING: {warning}", file=sys.stderr)
        configure_command()
        signal.signal(signal.SIGINT, leave)
        gc.disable()
        if check and launch.size == 1 and not launch.has_store and not launch.problem:
            check(flags)
        if is_main and sys.stderr.isatty():
            print("Loading torch …", file=sys.stderr)  # takes seconds
    except ConfigError as error:
        if is_main or launch.may_have_own_flags:  # other ranks see the same mistake
            print(f"{prefix}error: {error}", file=sys.stderr)
        else:
            time.sleep(REPORT_S)
        answer.fail(error.kind, str(error), error.exit_code)
        sys.exit(error.exit_code)


def _print_mistake(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    mistake = explain_exception(error) or (error if isinstance(error, UserError) else None)
    if mistake is None:
        sys.__excepthook__(kind, error, traceback)
        answer.fail("bug", first_line(error), 1)
    else:
        print(f"error: {mistake}", file=sys.stderr)
        answer.fail(mistake.kind, str(mistake), 1)


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
