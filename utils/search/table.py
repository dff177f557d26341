"""evolve.csv: a line for each trial of a search, in the names that YOLOv5's table had."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.config import Hyp
from tessera.utils.files import atomic_write
from tessera.utils.search.space import hyp_of

_FIGURES = ("fitness", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95")


class Row(NamedTuple):
    """A trial that has ended.

    Attributes:
        number: of the trial, from 0.
        end: "measured"; "pruned", with what it had by then; "diverged", with what it had or nothing.
        objective: its value; None where it has none.
        figures: fitness, precision, recall, mAP50, mAP50-95.
        hyp: its hyperparameters.
    """

    number: int
    end: str
    objective: float | None
    figures: Sequence[float]
    hyp: Hyp


def rows(trials: Iterable[Any], start: Hyp) -> list[Row]:
    """Optuna's trials that have ended as rows."""
    return [
        Row(
            trial.number,
            trial.user_attrs.get("end", "measured"),
            trial.value,
            trial.user_attrs.get("figures") or (0.0,) * len(_FIGURES),
            hyp_of(start, trial.params),
        )
        for trial in trials
    ]


def write_rows(path: Path, trials: Iterable[Row]) -> None:
    """Write the table whole or not at all."""
    keys = [f.name for f in dataclasses.fields(Hyp)]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("generation", *_FIGURES, "objective", "end", *keys))
    for number, end, objective, figures, hyp in trials:
        table.writerow((number, *figures, objective, end, *(getattr(hyp, key) for key in keys)))
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def best_first(trials: Iterable[Row]) -> list[Row]:
    """The rows that were measured, the highest objective first."""
    measured = [row for row in trials if row.end == "measured" and row.objective is not None]
    return sorted(measured, key=lambda row: -(row.objective or 0.0))
