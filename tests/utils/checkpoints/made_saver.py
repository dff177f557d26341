"""Savers of a small run, metrics, and a disk that blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.state import TrainState
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.ranks.world import World
from tessera.utils.types import Metrics

WAIT_S = 60.0  # for a thread that should be there immediately
METRICS = Metrics(
    precision=0.5,
    recall=0.6,
    map50=0.8,
    map=0.7,
    class_ids=np.arange(2),
    per_class=np.full((2, 4), 0.5),
    images_per_class=np.array([3, 4]),
    objects_per_class=np.array([5, 6]),
    images=7,
    objects=11,
    confidence=0.3,
    class_confidences=np.array([0.25, 0.3]),
)


def open_saver(folder: Path, state: TrainState[Any], **flags: Any) -> Saver:
    config = TrainConfig(epochs=9, **flags)
    context = RunContext(config, load_hyp("hyp.scratch-low.yaml"), World(), 64, 32, folder)
    return Saver(context, state, "abc", None, StopSignals(), lambda: False)


class SlowDisk:
    """`save_checkpoint` that starts to write only when it is released.

    Attributes:
        begun: set once a write has begun.
        go: lets it continue.
        calls: names of the files.
    """

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def __call__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.calls.append(path.name)
        self.begun.set()
        assert self.go.wait(WAIT_S)
        save_checkpoint(path, content)
