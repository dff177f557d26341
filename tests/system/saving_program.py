"""train.py with a slow disk, whose writes end only when somebody waits for them; counts forks and steps until then.

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

import tessera.utils.checkpoints.saver as saver
from tessera.commands import train
from tessera.utils.engine.step import TrainStep

writing, awaited = threading.Event(), threading.Event()
counts: Counter[str] = Counter()


def slow_save(path: Path, content: Mapping[str, Any], save: Any = saver.save_checkpoint) -> None:
    """Save as `save_checkpoint` does, which is over only when somebody waits for it."""
    writing.set()
    save(path, content)
    if threading.current_thread() is not threading.main_thread():
        awaited.wait(60)
    writing.clear()
    counts["writes"] += 1


def waiting(finish: Any) -> Any:
    def finish_writing(self: saver.Saver, **how: Any) -> Any:
        if self._writing is not None:
            awaited.set()
        result = finish(self, **how)
        awaited.clear()
        return result

    return finish_writing


def count_step(self: TrainStep, *args: Any, step: Any = TrainStep.__call__) -> Any:
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
