"""Tables of the report page: classes, confusion, recall by size, shape and crowd, dataset."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.report.page_data import ReportData
from tessera.utils.evaluation.error_counts import KINDS
from tessera.utils.evaluation.matching import Kind
from tessera.utils.report.charts import most_confused
from tessera.utils.text import one_line
from tessera.utils.types import DatasetIndex

MOST_ROWS = 1500  # of the table of classes: the lowest mAP50-95
MOST_CLASSES = 24  # of the confusion matrix: the most confused
SHADES = 8
# Lower edges of bins, and their names: pixels, width over height, objects.
_SIDES = (0, 8, 16, 32, 64, 128, 256)
_SIDE_NAMES = ("below 8", "8 to 15", "16 to 31", "32 to 63", "64 to 127", "128 to 255", "256 and more")
_ASPECTS = (0, 1 / 3, 2 / 3, 3 / 2, 3)
_ASPECT_NAMES = ("tall, below 1:3", "1:3 to 2:3", "2:3 to 3:2", "3:2 to 3:1", "wide, above 3:1")
_CROWDS = (1, 2, 5, 10, 20)
_CROWD_NAMES = ("1", "2 to 4", "5 to 9", "10 to 19", "20 and more")
_OUTCOMES = (Kind.CORRECT, Kind.WRONG_CLASS, Kind.LOCALIZATION, Kind.MISSED)

Row = dict[str, Any]


def class_rows(facts: ReportData) -> list[Row]:
    """Return metrics of each class that has objects, at the confidence of the best F1, in class order."""
    metrics, errors, trained = facts.found.metrics, facts.found.errors, facts.origin.trained_on
    counts = [metrics.images_per_class, metrics.objects_per_class]
    if trained is not None:
        counts.insert(0, images_by_class(trained))
    false = errors.class_kind_counts.sum(1) - errors.class_kind_counts[:, KINDS.index(Kind.CORRECT)]
    rows = []
    for row in np.sort(np.argsort(metrics.per_class[:, 3], kind="stable")[:MOST_ROWS]).tolist():
        c = int(metrics.class_ids[row])
        figures, confidence = metrics.per_class[row].tolist(), float(metrics.class_confidences[c])
        own = {"counts": [int(column[c]) for column in counts], "figures": figures}
        rows.append({"name": facts.name(c), **own, "false": int(false[c]), "confidence": confidence})
    return rows


def images_by_class(index: DatasetIndex) -> NDArray[np.int64]:
    """Count the images that have an object of each class: (C,)."""
    nc = len(index.names)
    images = np.repeat(np.arange(len(index), dtype=np.int64), np.diff(index.box_offsets))  # of the objects
    return np.bincount(np.unique(images * nc + index.classes) % nc, minlength=nc)


def confusion_table(facts: ReportData, shown_pairs: Collection[str]) -> Row:
    """Return the confusion matrix: `names`, `left` classes grouped together, and cells by predicted class.

    `shown_pairs` are those of the errors in the gallery.
    """
    confusion = facts.found.errors.confusion
    chosen, matrix = most_confused(confusion, MOST_CLASSES)
    left = confusion.nc - len(chosen)
    names: dict[int | None, str | None] = {c: facts.name(c) for c in chosen.tolist()}
    names |= {None: f"{left:,} others", -1: None} if left else {-1: None}
    totals = np.maximum(matrix.sum(0), 1)
    rows = []
    for counts, (predicted, row_name) in zip(matrix, names.items(), strict=True):
        cells = zip(counts.tolist(), counts / totals, names.items(), strict=True)
        rows.append(
            [
                {
                    "number": count,
                    "shade": int(np.ceil(share * SHADES)),
                    "right": predicted == true,
                    "pair": pair if count and (pair := f"{predicted} {true}") in shown_pairs else "",
                    "says": f"{count:,} {in_words(row_name, name)}",
                }
                for count, share, (true, name) in cells
            ]
        )
    return {"names": [name or "background" for name in names.values()], "rows": rows, "left": left}


def in_words(predicted: str | None, true: str | None) -> str:
    """Describe a cell by the names of its row and column, None for background."""
    if predicted is None:
        return f"{true}: not detected"
    if true is None:
        return f"{predicted}: false positives"
    return f"{true}: predicted as {predicted}" if predicted != true else f"{true}: detected"


def breakdowns(facts: ReportData) -> list[Row]:
    """Return recall by size, by shape and by number of objects in the image; empty without objects."""
    errors = facts.found.errors
    if len(errors.outcomes) == 0:
        return []
    counts = np.diff(errors.offsets)
    images = np.repeat(errors.images, counts)
    rows = np.arange(len(images)) - np.repeat(errors.offsets[:-1], counts) + facts.index.box_offsets[images]
    boxes = facts.index.boxes_xyxy[rows]
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    sides = scaled_sizes(facts.index, images, boxes, facts.origin.imgsz)
    seen = f"side in pixels, in an image of {facts.origin.imgsz}"
    ratios, crowds, outcomes = width / np.maximum(height, 1e-6), np.repeat(counts, counts), errors.outcomes
    return [
        _recalls("Recall by size", seen, np.digitize(sides, _SIDES), _SIDE_NAMES, outcomes),
        _recalls("Recall by shape", "width to height", np.digitize(ratios, _ASPECTS), _ASPECT_NAMES, outcomes),
        _recalls("Recall by crowd", "objects in the image", np.digitize(crowds, _CROWDS), _CROWD_NAMES, outcomes),
    ]


def _recalls(
    title: str, noun: str, bins: NDArray[np.int64], names: tuple[str, ...], outcomes: NDArray[np.uint8]
) -> Row:
    """Count the outcomes of objects in each bin, from 1; `parts` are fractions."""
    table = np.zeros((len(names), len(Kind)), np.int64)
    np.add.at(table, (bins - 1, outcomes), 1)
    rows = []
    for name, counts in zip(names, table[:, list(_OUTCOMES)].tolist(), strict=True):
        if total := sum(counts):
            parts = [(kind.name.lower(), count / total) for kind, count in zip(_OUTCOMES, counts, strict=True)]
            rows.append({"name": name, "objects": total, "counts": counts, "recall": counts[0] / total, "parts": parts})
    return {"title": title, "noun": noun, "rows": rows}


def scaled_sizes(
    index: DatasetIndex, images: NDArray[np.int64], boxes_xyxy: NDArray[np.float32], imgsz: int
) -> NDArray[np.float64]:
    """Return the root of the area of boxes (M,), in pixels of an image whose long side is `imgsz`."""
    area = np.maximum((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(1), 0)
    return np.sqrt(area) * imgsz / index.sizes_hw[images].max(1)


def splits_of(facts: ReportData) -> list[DatasetIndex]:
    """Return the known splits: both of a training, or the evaluated one."""
    trained_on = facts.origin.trained_on
    return [facts.index] if trained_on is None or trained_on.split == facts.index.split else [trained_on, facts.index]


def dataset(facts: ReportData) -> Row:
    """Summarise the dataset: images, objects and box sizes of each split, and what it leaves out."""
    splits = splits_of(facts)
    excluded = [one_line(index.excluded_summary, 1000) for index in splits if index.excluded_summary]
    return {"splits": [_split(index) for index in splits], "excluded": excluded}


def _split(index: DatasetIndex) -> Row:
    objects = np.diff(index.box_offsets)
    empty, most, ignored = int((objects == 0).sum()), int(objects.max(initial=0)), len(index.ignored_classes)
    height, width = np.median(index.sizes_hw, 0) if len(index) else (0, 0)
    counts = [len(index), len(index.classes), empty, most, ignored]
    return {"name": index.split, "counts": counts, "sizes": f"{width:.0f} × {height:.0f}"}
