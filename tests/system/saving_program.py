"""train.py on a slow disk: each file takes a while, and the forks and steps that happen meanwhile are counted.

Prints, as the last line, "writes N, forks F, while writing: S steps, W forks".
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import train
import utils.checkpoints.saver as saver
from utils.engine.step import TrainStep

WRITE_S = 0.4
writing = threading.Event()
counts: Counter[str] = Counter()


def slow_save(path: Path, content: Mapping[str, Any], save: Any = saver.save_checkpoint) -> None:
    """As `save_checkpoint`, with an unfinished file open for a while."""
    torch_save = torch.save

    def slow(value: Any, file: Any) -> None:
        torch_save(value, file)
        writing.set()
        time.sleep(WRITE_S)
        writing.clear()

    torch.save = slow
    try:
        save(path, content)
    finally:
        torch.save = torch_save
    counts["writes"] += 1


def count_step(self: TrainStep, *args: Any, step: Any = TrainStep.__call__) -> Any:
    """As a step, counted where a file is being written meanwhile."""
    before = writing.is_set()
    result = step(self, *args)
    counts["steps"] += before and writing.is_set()
    return result


def count_fork() -> None:
    counts["forks"] += 1
    counts["forks while writing"] += writing.is_set()


if __name__ == "__main__":
    saver.save_checkpoint = slow_save
    TrainStep.__call__ = count_step  # type: ignore[method-assign]
    os.register_at_fork(before=count_fork)
    code = train.main()
    print(
        f"writes {counts['writes']}, forks {counts['forks']}, "
        f"while writing: {counts['steps']} steps, {counts['forks while writing']} forks"
    )
    sys.exit(code)
