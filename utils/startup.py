"""Start of a command before torch is imported, and its end: flags, `--help`, Ctrl-C, streams, exit code."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

from tessera.utils.environment import Launch, keep_font_list, limit_openmp_spinning, max_pixels, silence_torch
from tessera.utils.errors import ConfigError, Interrupted, UserError, explain_exception, rank_0_reports
from tessera.utils.files import NO_DIRECTORY, working_directory
from tessera.utils.flags.json_output import answer
from tessera.utils.flags.options import Options
from tessera.utils.streams import protect_streams
from tessera.utils.text import first_line

INTERRUPTED = 128 + signal.SIGINT
END_S = 30.0  # for exit handlers of libraries


def check_command_line(options: type[Options]) -> None:
    """Handle `--help` and wrong flags, which exit, before torch is imported; return if the flags are valid.

    Then, until `run_command`, Ctrl-C ends the process without a traceback. Import errors that `explain_exception`
    knows are one message. Garbage collection is off, as imports make hundreds of thousands of lasting objects.
    """
    protect_streams()
    answer.open(options.program, sys.argv[1:])
    sys.excepthook = _print_mistake
    silence_torch()
    limit_openmp_spinning()
    is_main, prefix = True, ""
    try:
        launch = Launch.from_environment()
        is_main, prefix = launch.rank == 0, f"rank {launch.rank}: " if launch.rank else ""
        if not is_main:
            answer.leave_to_rank_0()
        max_pixels()
        if working_directory() is None:  # torch's libraries would end the process
            raise ConfigError(NO_DIRECTORY)
        options(**options.from_args(sys.argv[1:]))
        if is_main and (warning := options.warning(sys.argv[1:])):
            print(f"WARNING: {warning}", file=sys.stderr)
        keep_font_list()
        if is_main and sys.stderr.isatty():
            print("Loading torch …", file=sys.stderr)  # takes seconds
    except ConfigError as error:
        if is_main or launch.may_have_own_flags:  # other ranks see the same mistake
            print(f"{prefix}error: {error}", file=sys.stderr)
        else:
            rank_0_reports()
        answer.fail(error.kind, str(error), error.exit_code)
        sys.exit(error.exit_code)

    def leave(number: int, frame: FrameType | None) -> None:
        if is_main:
            os.write(2, b"interrupted\n")
        answer.fail(Interrupted.kind, "interrupted", INTERRUPTED)
        os._exit(INTERRUPTED)  # an exception would surface as an error of an import

    signal.signal(signal.SIGINT, leave)
    gc.disable()


def end_process(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, without the second that freeing all objects takes; a command's last line.

    Threads and exit handlers get at most `END_S` seconds: a tracker may wait for its server. Under another program,
    such as a profiler or a debugger, raise SystemExit instead.
    """
    if sys._getframe(1).f_back is not None:
        sys.exit(exit_code)
    limit = threading.Timer(END_S, _end_at_once, (exit_code,))
    limit.daemon = True
    limit.start()
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter's own first step
    atexit._run_exitfuncs()
    _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _print_mistake(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    mistake = explain_exception(error) or (error if isinstance(error, UserError) else None)
    if mistake is None:
        sys.__excepthook__(kind, error, traceback)
        answer.fail("bug", first_line(error), 1)
    else:
        print(f"error: {mistake}", file=sys.stderr)
        answer.fail(mistake.kind, str(mistake), 1)
