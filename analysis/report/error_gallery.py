"""Gallery of the worst errors with image crops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.analysis.error_analysis.files import NAMES, ErrorItem
from tessera.analysis.report.crops import Crop, Subject, render_crops
from tessera.analysis.report.page_data import ReportData
from tessera.analysis.report.tables import MOST_CLASSES, in_words, scaled_sizes
from tessera.data.source.scan import ImageLabels
from tessera.utils.evaluation.error_counts import Errors
from tessera.utils.evaluation.matching import Kind
from tessera.utils.report.charts import most_confused
from tessera.utils.text import one_line
from tessera.utils.types import DatasetIndex

WORST = 60  # errors that are shown for their cost alone
OF_A_KIND = 15  # that are shown beside them
OF_A_CELL = 2  # of the confusion matrix that is shown
MOST = 140
_SIZES = ((32, "small"), (96, "medium"), (np.inf, "large"))  # COCO's, in the image as the model sees it

Pair = tuple[int, int]


def chosen(kinds: Sequence[int], cells: Sequence[Pair] = (), classes: Collection[int] = ()) -> list[int]:
    """Select errors to show: the worst of all, of each kind and of each cell of the matrix; then the next worst.

    `kinds` and `cells` are of the errors, the worst first; `classes` are those of the matrix shown, background
    included.
    """
    taken = dict.fromkeys(range(min(WORST, len(kinds))))
    shown = [frozenset(cell) <= frozenset(classes) for cell in cells] or [False] * len(kinds)
    cells = cells or [(-1, -1)] * len(kinds)
    of_kind, of_cell = Counter(kinds[: len(taken)]), Counter(cells[: len(taken)])
    for row in range(len(taken), len(kinds)):
        if of_kind[kinds[row]] < OF_A_KIND or (shown[row] and of_cell[cells[row]] < OF_A_CELL):
            taken[row] = None
            of_kind[kinds[row]] += 1
            of_cell[cells[row]] += 1
    taken |= dict.fromkeys(range(min(MOST, len(kinds))))
    return sorted(list(taken)[:MOST])


def cells_of(errors: Errors, items: Sequence[ErrorItem]) -> list[Pair]:
    """Return the cell of the confusion matrix of each error: predicted and true class, -1 for background.

    A pair of classes counts the most confident detection of another class on an object without a true positive.
    """
    places = dict(zip(errors.images.tolist(), errors.offsets[:-1].tolist(), strict=True))
    confused: dict[Pair, int] = {}
    for row in sorted(range(len(items)), key=lambda row: -items[row].score):
        item = items[row]
        own = places[item.image] + item.object
        if item.kind is Kind.WRONG_CLASS and errors.outcomes[own] == Kind.WRONG_CLASS:
            confused.setdefault((item.image, item.object), row)
    pairs = set(confused.values())
    cells = []
    for row, item in enumerate(items):
        predicted, true = (-1 if c is None else c for c in (item.predicted, item.true))
        cells.append((predicted, true if row in pairs or item.kind is Kind.MISSED else -1))
    return cells


def gallery(facts: ReportData) -> list[dict[str, Any]]:
    """Return the errors shown, by cost, as the macro `gallery` takes them."""
    cells = cells_of(facts.found.errors, facts.items)
    classes, _ = most_confused(facts.found.errors.confusion, MOST_CLASSES)
    rows = chosen([item.kind for item in facts.items], cells, {-1, *classes.tolist()})
    crops = render_crops(
        facts.index, [Subject(item.image, item.true_box, item.box) for item in map(facts.items.__getitem__, rows)]
    )
    return [_entry(facts, row, cells[row], crop) for row, crop in zip(rows, crops, strict=True)]


def _entry(facts: ReportData, row: int, cell: Pair, crop: Crop) -> dict[str, Any]:
    item = facts.items[row]
    predicted, true = ("" if c is None else facts.name(c) for c in (item.predicted, item.true))
    box = item.box if item.true_box is None else item.true_box
    assert box is not None, "an error has a box"
    (side,) = scaled_sizes(facts.index, np.array([item.image]), np.array([box], np.float32), facts.origin.imgsz)
    size = next(name for above, name in _SIZES if side < above)
    figures = [f"confidence {item.score:.2f}", *([] if item.iou is None else [f"IoU {item.iou:.2f}"]), size]
    also = "also " * (item.kind is Kind.WRONG_CLASS and cell[1] < 0)  # a more confident detection is in the cell
    says = {
        Kind.WRONG_CLASS: f"{true} {also}predicted as {predicted}",
        Kind.LOCALIZATION: f"{predicted}, localization error",
        Kind.BOTH: f"{predicted} near {true}",
        Kind.DUPLICATE: f"{predicted} detected twice",
        Kind.BACKGROUND: f"{predicted} where nothing is labelled",
        Kind.MISSED: f"{true} not detected",
    }
    return {
        "number": row + 1,
        "kind": NAMES[item.kind],
        "pair": f"{cell[0]} {cell[1]}",
        "classes": in_words(*(None if c < 0 else facts.name(c) for c in cell)),
        "size": size,
        "says": says[item.kind],
        "details": ", ".join(figures),
        "crop": crop,
        **place_of(facts.index, facts.labels, item.image, item.object),
    }


def place_of(index: DatasetIndex, labels: Mapping[int, ImageLabels], image: int, row: int) -> dict[str, str]:
    """Return the file names of an image and of its labels, with the line or id of one label."""
    place = ""
    if image in labels:
        line, own = labels[image].place(row)
        place = one_line(labels[image].file, 200)
        place += f":{line}" if line is not None else f", id {one_line(str(own))}" if own is not None else ""
    return {"image": one_line(index.path(image).name, 100), "label": place}
