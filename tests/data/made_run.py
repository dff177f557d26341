"""A RunContext made by hand: what a loader needs to know of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.engine.context import RunContext
from tessera.utils.image_size import ImageSize
from tessera.utils.ranks.world import World


def made_run(hyp: Hyp, world: Any = None, /, *, imgsz: ImageSize, batch_size: int, **flags: Any) -> RunContext:
    """A run of `world`, or of a single rank, with the flags given and a stride of 32; it has no folder."""
    return RunContext(
        TrainConfig(**{"weights": "", "batch_size": batch_size, **flags}), hyp, world or World(), imgsz, 32, Path()
    )
