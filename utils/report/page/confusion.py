"""Which class is taken for which, as a table of shades whose cells lead to their pictures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.confusion import ConfusionMatrix
from tessera.utils.report.page.facts import Facts

MOST_CLASSES = 24  # of more, the most confused are shown
SHADES = 8


class Cell(NamedTuple):
    """Objects or detections of a pair.

    Attributes:
        number: how many.
        shade: 0 to `SHADES`, by the share of the true class.
        right: whether it is on the diagonal.
        pair: "predicted true" as indices, where the cell is of one pair that has pictures to look at; else "".
        says: what the cell is, in words.
    """

    number: int
    shade: int
    right: bool
    pair: str
    says: str


class HeatMap(NamedTuple):
    """The table: names of its rows and columns, and cells by row, which is the predicted class."""

    names: list[str]
    rows: list[list[Cell]]
    left: int


def most_confused(confusion: ConfusionMatrix, most: int = MOST_CLASSES) -> NDArray[np.int64]:
    """The classes that are shown, ascending: all, or those most often confused with another."""
    return np.sort(confusion.confusions().argsort(kind="stable")[-most:])


def in_words(predicted: str | None, true: str | None) -> str:
    """What a cell has, by the names of its row and column, None of background."""
    if predicted is None:
        return f"{true}: not found"
    if true is None:
        return f"{predicted}: detections without an object of their own"
    return f"{true}: taken for {predicted}" if predicted != true else f"{true}: found"


def heat_map(facts: Facts, shown_pairs: frozenset[tuple[int, int]]) -> HeatMap:
    """The matrix; classes that are left out are one row and column, if there are any.

    Args:
        facts: of the run.
        shown_pairs: (predicted, true) of the errors in the gallery, -1 of what is none.
    """
    confusion = facts.found.errors.confusion
    chosen = most_confused(confusion)
    left, background = confusion.nc - len(chosen), -1
    ids: list[int | None] = [*chosen.tolist(), *([None] if left else []), background]
    group_of = np.full(confusion.nc + 1, len(chosen))
    group_of[chosen], group_of[-1] = range(len(chosen)), len(ids) - 1
    matrix = confusion.grouped(group_of)
    totals = np.maximum(matrix.sum(0), 1)
    names: list[str | None] = [*(facts.name(c) for c in chosen.tolist()), *([f"{left:,} others"] if left else []), None]
    rows = []
    for i, predicted in enumerate(ids):
        row = []
        for j, true in enumerate(ids):
            count, share = int(matrix[i, j]), matrix[i, j] / totals[j]
            pair = (predicted, true) if predicted is not None and true is not None else None
            leads = f"{predicted} {true}" if count and pair in shown_pairs else ""
            shade = int(np.ceil(share * SHADES)) if count else 0
            row.append(Cell(count, shade, i == j, leads, f"{count:,} {in_words(names[i], names[j])}"))
        rows.append(row)
    return HeatMap([name or "background" for name in names], rows, left)
