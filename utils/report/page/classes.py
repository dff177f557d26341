"""The table of classes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.utils.evaluation.matching import Kind
from tessera.utils.evaluation.tally import KINDS
from tessera.utils.report.page.dataset import pictures_by_class
from tessera.utils.report.page.facts import Facts

MOST_ROWS = 1500  # those found worst


class ClassRow(NamedTuple):
    """A class that has objects; in how many pictures it is that were trained on, None where that is not known."""

    name: str
    trained: int | None
    images: int
    objects: int
    precision: float
    recall: float
    ap50: float
    ap: float
    false: int
    confidence: float


class ClassTable(NamedTuple):
    """Rows by the order of the classes, and how many are not shown."""

    rows: list[ClassRow]
    left: int


def class_table(facts: Facts) -> ClassTable:
    """Figures of each class, at the confidence of the best F1."""
    metrics, errors = facts.found.metrics, facts.found.errors
    trained = None if facts.origin.trained_on is None else pictures_by_class(facts.origin.trained_on)
    false = errors.class_finds.sum(1) - errors.class_finds[:, KINDS.index(Kind.CORRECT)]
    shown = np.sort(np.argsort(metrics.per_class[:, 3], kind="stable")[:MOST_ROWS])
    rows = []
    for row in shown.tolist():
        c = int(metrics.class_ids[row])
        counts = int(metrics.images_per_class[c]), int(metrics.objects_per_class[c])
        precision, recall, ap50, ap = metrics.per_class[row].tolist()
        own = None if trained is None else int(trained[c])
        rows.append(
            ClassRow(
                facts.name(c),
                own,
                *counts,
                precision,
                recall,
                ap50,
                ap,
                int(false[c]),
                float(metrics.class_confidences[c]),
            )
        )
    return ClassTable(rows, len(metrics.class_ids) - len(rows))
