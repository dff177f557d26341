"""The first tenths of a second of a command: before torch, whose import takes seconds."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

from tessera.utils.environment import Launch, keep_font_list, max_pixels, quieten_torch, spin_briefly
from tessera.utils.errors import ConfigError, Interrupted, UserError, explained, leave_the_report_to_rank_0
from tessera.utils.flags.json_output import answer
from tessera.utils.flags.options import Options
from tessera.utils.streams import keep_streams
from tessera.utils.text import first_line

INTERRUPTED = 128 + signal.SIGINT
END_S = 30.0  # for what libraries have registered for the end of the process


def check_command_line(options: type[Options]) -> None:
    """Answer `--help` and a wrong flag at once, and leave the process; return where the flags are right.

    TESSERA_MAX_PIXELS is checked with them, and the folder of matplotlib's list of fonts set before it is imported.
    From then on Ctrl-C ends the process quietly, until whatever runs next handles the signal itself, stdout and stderr
    may fail, and a limit of the system, or a missing library, that an import meets is one message. Garbage is not
    collected until `run_command`: imports make hundreds of thousands of objects, all of which stay.
    """
    keep_streams()
    answer.open(options.program, sys.argv[1:])
    sys.excepthook = _print_mistake
    quieten_torch()
    spin_briefly()
    is_main, said_by = True, ""
    try:
        launch = Launch.from_environment()
        is_main, said_by = launch.rank == 0, f"rank {launch.rank}: " if launch.rank else ""
        if not is_main:
            answer.leave_to_rank_0()
        max_pixels()
        options(**options.from_args(sys.argv[1:]))
        if is_main and (idle := options.warning(sys.argv[1:])):
            print(f"WARNING: {idle}", file=sys.stderr)
        keep_font_list()
    except ConfigError as error:
        if is_main or launch.may_have_own_flags:  # other ranks find the same mistake
            print(f"{said_by}error: {error}", file=sys.stderr)
        else:
            leave_the_report_to_rank_0()
        answer.fail(error.kind, str(error), error.exit_code)
        sys.exit(error.exit_code)

    def leave(number: int, frame: FrameType | None) -> None:
        if is_main:
            os.write(2, b"interrupted\n")
        answer.fail(Interrupted.kind, "interrupted", INTERRUPTED)
        os._exit(INTERRUPTED)  # an exception would surface in the middle of an import, as an error of that import

    signal.signal(signal.SIGINT, leave)
    gc.disable()


def end_process(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, without the second of work to free every module and object one by one.

    Threads are waited for, and what is registered for the end is done, but no longer than `END_S`: a tracker's package
    may wait for its server there. For a command's last line only. Where another program runs the command, such as a
    profiler or a debugger, that one has the last word: it gets the SystemExit.
    """
    if sys._getframe(1).f_back is not None:
        sys.exit(exit_code)
    limit = threading.Timer(END_S, _end_at_once, (exit_code,))
    limit.daemon = True
    limit.start()
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter itself begins
    atexit._run_exitfuncs()
    _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _print_mistake(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    mistake = explained(error) or (error if isinstance(error, UserError) else None)
    if mistake is None:
        sys.__excepthook__(kind, error, traceback)
        answer.fail("defect", first_line(error), 1)
    else:
        print(f"error: {mistake}", file=sys.stderr)
        answer.fail(mistake.kind, str(mistake), 1)
