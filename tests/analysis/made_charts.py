"""What charts are made of: class names, a dataset, curves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.error_counts import ConfusionMatrix
from tessera.utils.evaluation.curves import Curves
from tessera.utils.types import DatasetIndex
from tests.data.made_index import make_index

LONG = "a very long class name that goes on and on and on"


def names(count: int, kind: str) -> list[str]:
    return [f"{i} {LONG}" if kind == "long" else f"class {i}" for i in range(count)]


def index(class_names: list[str], objects: int) -> DatasetIndex:
    """Images of 640 x 480 pixels with boxes of any size and place."""
    rng = np.random.default_rng(objects)
    images = max(objects // 5, 1)
    centres, half = rng.uniform(0, 1, (objects, 2)), rng.beta(1, 5, (objects, 2)) / 2
    boxes = np.concatenate((centres - half, centres + half), 1).clip(0, 1) * [640, 480, 640, 480]
    return dataclasses.replace(
        make_index([(480, 640)] * images),
        names=tuple(class_names),
        box_offsets=np.array([0, *np.sort(rng.integers(0, objects + 1, images - 1)), objects]),
        classes=rng.integers(0, len(class_names), objects).astype(np.int32),
        boxes_xyxy=boxes.astype(np.float32),
    )


def curves(classes: int) -> Curves:
    axis = np.linspace(0, 1, 1000)
    power = 1 + np.arange(classes, dtype=float)[:, None]
    recall, precision = 1 - axis**power, 0.5 + 0.5 * axis**power
    return Curves(
        class_ids=np.arange(classes),
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall),
        precision_at_recall=1 - np.linspace(0, 1, 101) ** power,
        ap50=power[:, 0] / (power[:, 0] + 1),
        best=500,
        class_best=np.full(classes, 500),
    )


def confusion_of(matrix: NDArray[Any]) -> ConfusionMatrix:
    """Counts of pairs of classes, from the whole matrix."""
    cells = np.flatnonzero(matrix)
    return ConfusionMatrix(len(matrix) - 1, cells, matrix.ravel()[cells].astype(np.int64))
