"""train.py with the times of its turns as JSON in the file of the first argument; for tests.benchmarks.start_and_end.

Processor time is of this process from its birth, without its workers.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.utils.config import TrainConfig
from tessera.utils.startup import check_command_line, end_process

out = Path(sys.argv.pop(1))
if __name__ == "__main__":
    check_command_line(TrainConfig)

import tessera.commands.train as program
from tessera.utils.report.journal import Journal
from tessera.utils.training import start
from tessera.utils.training.validation import Validation

turns: list[tuple[str, float, float]] = []


def turn(name: str) -> None:
    """What ends here, at its first time."""
    if name not in (known for known, *_ in turns):
        turns.append((name, time.time(), time.process_time()))


def timed(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Let a function tell when it is called or has returned."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        if before:
            turn(before)
        found = function(*args, **kwargs)
        if after:
            turn(after)
        return found

    setattr(owner, name, told)


if __name__ == "__main__":
    turn("imports")
    timed(start, "read_data", "flags, folder", "index")
    timed(program, "open_run", after="model, anchors, optimizer")
    timed(program.Journal, "__init__", "loaders", "record, labels.jpg")
    timed(program.TrainStep, "__call__", "preflight", "first step, with its batch")
    timed(Validation, "of_best", "epochs", "")
    timed(Journal, "finish", "best.pt measured, report", "results.png, trackers")
    code = program.main()
    turn("last lines")
    out.write_text(json.dumps(turns))
    end_process(code)
