"""train.py on a disk that is done only when somebody waits for it; forks and steps until then are counted.

Prints, as the last line, "writes N, forks F, while writing: S steps, W forks".
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tessera.utils.checkpoints.saver as saver
from tessera.commands import train
from tessera.utils.engine.step import TrainStep

writing, awaited = threading.Event(), threading.Event()
counts: Counter[str] = Counter()


def slow_save(path: Path, content: Mapping[str, Any], save: Any = saver.save_checkpoint) -> None:
    """As `save_checkpoint`, with the unfinished file open until somebody waits for it."""
    torch_save = torch.save

    def slow(value: Any, file: Any) -> None:
        writing.set()
        torch_save(value, file)
        if threading.current_thread() is not threading.main_thread():
            awaited.wait(60)
        writing.clear()

    torch.save = slow
    try:
        save(path, content)
    finally:
        torch.save = torch_save
    counts["writes"] += 1


def waiting(finish: Any) -> Any:
    """As the method that waits for the disk, and let the disk know."""

    def finish_writing(self: saver.Saver, **how: Any) -> Any:
        if self._writing is not None:
            awaited.set()
        result = finish(self, **how)
        awaited.clear()
        return result

    return finish_writing


def count_step(self: TrainStep, *args: Any, step: Any = TrainStep.__call__) -> Any:
    """As a step, counted where a file is being written at its end."""
    result = step(self, *args)
    counts["steps"] += writing.is_set()
    return result


def count_fork() -> None:
    counts["forks"] += 1
    counts["forks while writing"] += writing.is_set()


if __name__ == "__main__":
    saver.save_checkpoint = slow_save
    saver.Saver._finish_writing = waiting(saver.Saver._finish_writing)  # type: ignore[method-assign]
    TrainStep.__call__ = count_step  # type: ignore[method-assign]
    os.register_at_fork(before=count_fork)
    code = train.main()
    print(
        f"writes {counts['writes']}, forks {counts['forks']}, "
        f"while writing: {counts['steps']} steps, {counts['forks while writing']} forks"
    )
    sys.exit(code)
