"""Precision, recall and F1 at every confidence, few enough for a page, for its slider."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.curves import Curves
from tessera.utils.report.page.facts import Facts

STEPS = 200  # confidences, and beside them the best one of all classes and of each
MOST_CLASSES = 80  # that have curves of their own: those with most objects
_PARTS = 1000  # of 1, that a ratio is sent in


def curves_of(facts: Facts) -> dict[str, Any] | None:
    """What page.js needs, as JSON has it; None where there is no object.

    Ratios are in thousandths. Beside the means over the classes are the counts: detections, those of them that are
    correct, and objects.
    """
    curves, ranking = facts.found.curves, facts.found.ranking
    if len(curves.class_ids) == 0:
        return None
    objects = np.diff(ranking.target_offsets)
    chosen = np.sort(np.argsort(-objects, kind="stable")[:MOST_CLASSES])
    own = curves.class_best()
    steps = thinned_steps(curves, own[chosen])
    groups = [_group(curves, steps, slice(None), ranking.above.sum(0), ranking.correct_above.sum(0), objects.sum())]
    for row in chosen.tolist():
        counts = ranking.above[row], ranking.correct_above[row], objects[row]
        groups.append(_group(curves, steps, slice(row, row + 1), *counts))
    names = ["all that have objects", *(facts.name(int(curves.class_ids[row])) for row in chosen)]
    best = [curves.best, *own[chosen].tolist()]
    for group, name, step in zip(groups, names, best, strict=True):
        group |= {"name": name, "best": int(np.searchsorted(steps, step))}
    return {
        "confidence": [round(float(value), 4) for value in curves.confidence[steps]],
        "groups": groups,
        "left": len(curves.class_ids) - len(chosen),
    }


def thinned_steps(curves: Curves, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Confidences that are sent, as indices of the curves, with the best one and those that are wanted."""
    even = np.linspace(0, len(curves.confidence) - 1, STEPS + 1).round().astype(np.int64)
    return np.unique(np.concatenate((even, [curves.best], wanted)))


def _group(
    curves: Curves,
    steps: NDArray[np.int64],
    rows: slice,
    above: NDArray[np.integer],
    correct: NDArray[np.integer],
    objects: Any,
) -> dict[str, Any]:
    """Means over some classes, and their counts."""
    ratios = {"p": curves.precision, "r": curves.recall, "f": curves.f1}
    sent: dict[str, Any] = {
        name: np.rint(_PARTS * values[rows][:, steps].mean(0)).astype(int).tolist() for name, values in ratios.items()
    }
    return {**sent, "n": above[steps].tolist(), "c": correct[steps].tolist(), "objects": int(objects)}
