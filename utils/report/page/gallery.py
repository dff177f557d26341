"""The worst errors with their pictures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tessera.utils.diagnosis.files import NAMES
from tessera.utils.diagnosis.gains import ERROR_KINDS
from tessera.utils.diagnosis.listing import ErrorItem
from tessera.utils.evaluation.matching import Kind
from tessera.utils.evaluation.tally import Errors
from tessera.utils.report.page.breakdown import sides_as_seen
from tessera.utils.report.page.confusion import in_words, most_confused
from tessera.utils.report.page.crops import NO_CROP, Crop, Mark, Subject, crops_of
from tessera.utils.report.page.facts import Facts, readable

WORST = 60  # errors that are shown for their cost alone
OF_A_KIND = 10  # that are shown beside them
OF_A_CELL = 2  # of the confusion matrix that is shown
MOST = 140
_SIZES = ((32, "small"), (96, "medium"), (np.inf, "large"))  # COCO's, in the picture as the model sees it


Pair = tuple[int, int]


class Shown(NamedTuple):
    """An error of the gallery.

    Attributes:
        number: its place by cost among all that were kept, from 1.
        kind: its name.
        predicted, true: names of the classes; "" of what is none.
        pair: "predicted true", the cell of the confusion matrix by indices, -1 of background.
        cell: that in words.
        size: of the object, or of the detection where there is none: "small", "medium" or "large".
        image: name of the file.
        says: what it is, in a sentence.
        details: figures.
        label: the file of the label with its line.
        uri: the crop; "" where the file cannot be read, or no room is left.
        width, height: of the crop.
        marks: on it.
    """

    number: int
    kind: str
    predicted: str
    true: str
    pair: str
    cell: str
    size: str
    image: str
    says: str
    details: str
    label: str
    uri: str
    width: int
    height: int
    marks: list[Mark]


def chosen(items: Sequence[ErrorItem], cells: Sequence[Pair], classes: frozenset[int]) -> list[int]:
    """Which errors are shown, by cost: the worst of all, of each kind, of each cell of the matrix; then the next worst.

    Args:
        items: errors by cost.
        cells: `cells_of` them.
        classes: that the confusion matrix has, background among them.
    """
    taken = dict.fromkeys(range(min(WORST, len(items))))
    of_kind, of_cell = Counter(items[row].kind for row in taken), Counter(cells[row] for row in taken)
    for row in range(len(taken), len(items)):
        kind, cell = items[row].kind, cells[row]
        if of_kind[kind] < OF_A_KIND or (of_cell[cell] < OF_A_CELL and classes.issuperset(cell)):
            taken[row] = None
            of_kind[kind] += 1
            of_cell[cell] += 1
    taken |= dict.fromkeys(range(min(MOST, len(items))))
    return sorted(list(taken)[:MOST])


def cells_of(errors: Errors, items: Sequence[ErrorItem]) -> list[Pair]:
    """The cell of the confusion matrix that each error is in: predicted and true class, -1 of background.

    A pair of classes has the most confident detection of another class on an object that none is correct for.
    """
    places = dict(zip(errors.images.tolist(), errors.offsets[:-1].tolist(), strict=True))
    confused: dict[tuple[int, int], int] = {}
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


def gallery(facts: Facts) -> list[Shown]:
    """The errors that are shown, by cost."""
    cells = cells_of(facts.found.errors, facts.items)
    rows = chosen(facts.items, cells, frozenset({-1, *most_confused(facts.found.errors.confusion).tolist()}))
    items = [facts.items[row] for row in rows]
    crops = dict(crops_of(facts.index, [Subject(item.image, item.true_box, item.box) for item in items]))
    return [_shown(facts, row, cells[row], crops.get(place, NO_CROP)) for place, row in enumerate(rows)]


def _shown(facts: Facts, row: int, cell: Pair, crop: Crop) -> Shown:
    item = facts.items[row]
    predicted, true = ("" if c is None else facts.name(c) for c in (item.predicted, item.true))
    labels = facts.labels.get(item.image)
    line, own = labels.place(item.object) if labels else (None, None)
    place = "" if labels is None else readable(labels.file, 200)
    place += f":{line}" if line is not None else f", id {readable(str(own))}" if own is not None else ""
    box = item.box if item.true_box is None else item.true_box
    assert box is not None, "an error has a box"
    (side,) = sides_as_seen(facts.index, np.array([item.image]), np.array([box], np.float32), facts.origin.imgsz)
    figures = [f"confidence {item.score:.2f}"]
    figures += [] if item.iou is None else [f"IoU {item.iou:.2f}"]
    return Shown(
        row + 1,
        NAMES[item.kind],
        predicted,
        true,
        f"{cell[0]} {cell[1]}",
        in_words(*(None if c < 0 else facts.name(c) for c in cell)),
        next(name for above, name in _SIZES if side < above),
        readable(facts.index.path(item.image).name, 100),
        _sentence(item.kind, predicted, true, is_found=item.kind is Kind.WRONG_CLASS and cell[1] < 0),
        ", ".join(figures),
        place,
        *crop,
    )


def _sentence(kind: Kind, predicted: str, true: str, *, is_found: bool) -> str:
    """What an error is; `is_found`: a detection of a wrong class is not the only one of its object."""
    return {
        Kind.WRONG_CLASS: f"{true} {'also ' * is_found}taken for {predicted}",
        Kind.BADLY_PLACED: f"{predicted}, badly placed",
        Kind.BOTH: f"{predicted} near {true}",
        Kind.DUPLICATE: f"{predicted} found twice",
        Kind.BACKGROUND: f"{predicted} where nothing is labelled",
        Kind.MISSED: f"{true} not found",
    }[kind]


def kinds_shown(shown: Sequence[Shown]) -> list[str]:
    """The kinds that are in the gallery, in their order."""
    there = {error.kind for error in shown}
    return list(itertools.compress(names := [NAMES[kind] for kind in ERROR_KINDS], (name in there for name in names)))
