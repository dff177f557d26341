"""What charts are made of: class names, a dataset, curves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.confusion import ConfusionMatrix
from tessera.utils.evaluation.curves import Curves
from tessera.utils.types import DatasetIndex

LONG = "a very long class name that goes on and on and on"


def names(count: int, kind: str) -> list[str]:
    return [f"{i} {LONG}" if kind == "long" else f"class {i}" for i in range(count)]


def index(class_names: list[str], objects: int) -> DatasetIndex:
    rng = np.random.default_rng(objects)
    images = max(objects // 5, 1)
    offsets = np.concatenate(([0], np.sort(rng.integers(0, objects + 1, images - 1)), [objects])).astype(np.int64)
    centres, half = rng.uniform(0, 1, (objects, 2)), rng.beta(1, 5, (objects, 2)) / 2
    boxes = np.concatenate((centres - half, centres + half), 1).clip(0, 1) * [640, 480, 640, 480]
    return DatasetIndex(
        split="train",
        names=tuple(class_names),
        path_bytes=np.zeros(0, np.uint8),
        path_offsets=np.zeros(images + 1, np.int64),
        sizes_hw=np.tile(np.array([[480, 640]], np.int32), (images, 1)),
        box_offsets=offsets,
        classes=rng.integers(0, len(class_names), objects).astype(np.int32),
        boxes_xyxy=boxes.astype(np.float32),
        segment_offsets=np.zeros(0, np.int64),
        segment_points=np.zeros((0, 2), np.float32),
        digest="0",
    )


def curves(classes: int) -> Curves:
    axis = np.linspace(0, 1, 1000)
    power = 1 + np.arange(classes, dtype=float)[:, None]
    recall, precision = 1 - axis**power, 0.5 + 0.5 * axis**power
    return Curves(
        class_ids=np.arange(classes),
        confidence=axis,
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall),
        recall_axis=np.linspace(0, 1, 101),
        precision_at_recall=1 - np.linspace(0, 1, 101) ** power,
        ap50=power[:, 0] / (power[:, 0] + 1),
        best=500,
    )


def confusion_of(matrix: NDArray[Any]) -> ConfusionMatrix:
    """Counts of pairs of classes, from the whole matrix."""
    cells = np.flatnonzero(matrix)
    return ConfusionMatrix(len(matrix) - 1, cells, matrix.ravel()[cells].astype(np.int64))
