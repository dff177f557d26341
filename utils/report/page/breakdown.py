"""Where objects are found and where not, by size, shape and crowd; and whether confidences can be trusted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import Ranking
from tessera.utils.evaluation.matching import Kind
from tessera.utils.report.page.facts import Facts
from tessera.utils.report.page.svg import bar
from tessera.utils.types import DatasetIndex

_SIDES = (0, 8, 16, 32, 64, 128, 256)  # pixels
_SIDE_NAMES = ("below 8", "8 to 15", "16 to 31", "32 to 63", "64 to 127", "128 to 255", "256 and more")
_ASPECTS = (0, 1 / 3, 2 / 3, 3 / 2, 3)  # width over height
_ASPECT_NAMES = ("tall, below 1:3", "1:3 to 2:3", "2:3 to 3:2", "3:2 to 3:1", "wide, above 3:1")
_CROWDS = (1, 2, 5, 10, 20)
_CROWD_NAMES = ("1", "2 to 4", "5 to 9", "10 to 19", "20 and more")
_OUTCOMES = (Kind.CORRECT, Kind.WRONG_CLASS, Kind.BADLY_PLACED, Kind.MISSED)
_CONFIDENCE_BINS = 10


class Row(NamedTuple):
    """Objects of a bin, and what became of them; `shares` are of them, in the order of `_OUTCOMES`."""

    name: str
    objects: int
    recall: float
    counts: tuple[int, ...]
    bar: Markup


class Breakdown(NamedTuple):
    """A table of bins."""

    title: str
    noun: str
    rows: list[Row]


class Trust(NamedTuple):
    """Detections of a range of confidence, and how many of them are correct."""

    name: str
    detections: int
    confidence: float
    precision: float
    bar: Markup


def breakdowns(facts: Facts) -> list[Breakdown]:
    """Objects by side, by shape and by how many there are in the picture; without objects, no table."""
    errors = facts.found.errors
    if len(errors.outcomes) == 0:
        return []
    counts = np.diff(errors.offsets)
    images = np.repeat(errors.images, counts)
    rows = np.arange(len(images)) - np.repeat(errors.offsets[:-1], counts) + facts.index.box_offsets[images]
    boxes = facts.index.boxes_xyxy[rows]
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    sides = sides_as_seen(facts.index, images, boxes, facts.origin.imgsz)
    aspects = width / np.maximum(height, 1e-6)
    crowd = np.repeat(counts, counts)
    seen = f"side in pixels, in a picture of {facts.origin.imgsz}"
    return [
        _breakdown("Recall by size", seen, sides, _SIDES, _SIDE_NAMES, errors.outcomes),
        _breakdown("Recall by shape", "width to height", aspects, _ASPECTS, _ASPECT_NAMES, errors.outcomes),
        _breakdown("Recall by crowd", "objects in the picture", crowd, _CROWDS, _CROWD_NAMES, errors.outcomes),
    ]


def sides_as_seen(
    index: DatasetIndex, images: NDArray[np.int64], boxes_xyxy: NDArray[np.float32], imgsz: int
) -> NDArray[np.float64]:
    """Root of the area of boxes (M,), in pixels of a picture whose long side is `imgsz`."""
    area = np.maximum((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(1), 0)
    return np.sqrt(area) * imgsz / index.sizes_hw[images].max(1)


def _breakdown(
    title: str,
    noun: str,
    values: NDArray[np.floating] | NDArray[np.int64],
    bounds: tuple[float, ...],
    names: tuple[str, ...],
    outcomes: NDArray[np.uint8],
) -> Breakdown:
    bins = np.searchsorted(bounds, values, side="right") - 1
    column = np.zeros(len(Kind), np.int64)
    column[list(_OUTCOMES)] = range(len(_OUTCOMES))
    size = len(names) * len(_OUTCOMES)
    table = np.bincount(bins * len(_OUTCOMES) + column[outcomes], minlength=size).reshape(len(names), -1)
    rows = []
    for name, counts in zip(names, table.tolist(), strict=True):
        if total := sum(counts):
            parts = [(kind.name.lower(), count / total) for kind, count in zip(_OUTCOMES, counts, strict=True)]
            rows.append(Row(name, total, counts[0] / total, tuple(counts), bar(parts)))
    return Breakdown(title, noun, rows)


def calibration(ranking: Ranking) -> list[Trust]:
    """Of the detections in each tenth of confidence, how many are correct at IoU 0.5: were confidences right, as many
    as they say. Of classes that have objects."""
    steps = ranking.above.shape[1]
    above, correct = (counts.sum(0).astype(np.int64) for counts in (ranking.above, ranking.correct_above))
    edges = np.linspace(0, steps - 1, _CONFIDENCE_BINS + 1).round().astype(int)
    rows = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        top = high == steps - 1  # whose last confidence belongs to it
        found = int(above[low] - (0 if top else above[high]))
        right = int(correct[low] - (0 if top else correct[high]))
        if found:
            name = f"{low / (steps - 1):.1f} to {high / (steps - 1):.1f}"
            within = above[low:high] - (0 if top else above[high])
            mean = (low + (within[1:].sum() + found / 2) / found) / (steps - 1)  # of steps of confidence
            rows.append(Trust(name, found, float(mean), right / found, bar([("correct", right / found)])))
    return rows


def calibration_error(rows: list[Trust]) -> float:
    """How far confidence and precision are apart, on average over the detections (Naeini et al. 2015)."""
    total = sum(row.detections for row in rows)
    return sum(row.detections * abs(row.confidence - row.precision) for row in rows) / max(total, 1)
