"""Splits that are made up, without files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tessera.data.source.checks.report import Part
from tessera.data.source.listing import Listing
from tessera.data.source.scan import Scan
from tessera.utils.types import DatasetSpec

NAMES = ("cat", "dog", "horse")
SIDE = 400
Objects = Sequence[tuple[int, float, float, float]]  # class, centre x and y, side, as shares of the picture


def made_part(split: str, scene: Callable[[np.random.Generator], Objects], images: int, seed: int) -> Part:
    """A split of scenes; the same for the same seed."""
    rng = np.random.default_rng(seed)
    scenes = [scene(rng) for _ in range(images)]
    rows = np.array([row for objects in scenes for row in objects], np.float64).reshape(-1, 4)
    half = rows[:, 3:] / 2
    fields: dict[str, Any] = dict.fromkeys(Scan._fields)
    fields |= {
        "kept": np.ones(images, np.bool_),
        "sizes_hw": np.full((images, 2), SIDE, np.int32),
        "counts": np.array([len(objects) for objects in scenes], np.int64),
        "classes": rows[:, 0].astype(np.int32),
        "boxes_xyxy": (SIDE * np.hstack((rows[:, 1:3] - half, rows[:, 1:3] + half))).astype(np.float32),
    }
    spec = DatasetSpec("made", yaml_path=Path("made.yaml"), root=Path(), splits={split: ()}, names=NAMES)
    return Part(spec, split, cast(Listing, None), Scan(**fields), False)
