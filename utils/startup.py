"""The first tenths of a second of a command: before torch, whose import takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

from utils.environment import Launch, keep_font_list, max_pixels, quieten_torch
from utils.errors import ConfigError, explained
from utils.options import Options
from utils.streams import keep_streams

INTERRUPTED = 128 + signal.SIGINT


def check_command_line(options: type[Options], argv: Sequence[str] | None = None) -> None:
    """Answer `--help` and a wrong flag at once, and leave the process; return where the flags are right.

    TESSERA_MAX_PIXELS is checked with them, and matplotlib, imported after it, is told where its list of fonts is kept.
    From then on Ctrl-C ends the process quietly, until whatever runs next handles the signal itself, stdout and stderr
    may fail, and a limit of the system that an import meets is one message.

    Args:
        options: the flags of the command.
        argv: the command line; None = this process's.
    """
    keep_streams()
    sys.excepthook = _say
    quieten_torch()
    is_main = True
    try:
        is_main = Launch.from_environment().rank == 0
        max_pixels()
        options(**options.from_args(sys.argv[1:] if argv is None else argv))
        keep_font_list()
    except ConfigError as error:
        if is_main:  # all ranks find the same mistake
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

    def leave(number: int, frame: FrameType | None) -> None:
        if is_main:
            os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)  # an exception would surface in the middle of an import, as an error of that import

    signal.signal(signal.SIGINT, leave)


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    mistake = explained(error)
    if mistake is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(f"error: {mistake}", file=sys.stderr)
