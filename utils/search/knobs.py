"""Which hyperparameters decided how good the trials of a search were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.config import Hyp
from tessera.utils.search.table import Row

FEWEST = 10  # trials
_SHUFFLES, _CHANCE = 300, 0.95


class Knob(NamedTuple):
    """A hyperparameter that mattered.

    Attributes:
        name: of it.
        correlation: with how good a trial is; above 0 where more is better.
    """

    name: str
    correlation: float


def knobs(trials: Sequence[Row]) -> list[Knob] | None:
    """The hyperparameters that mattered, most first; None with too few trials.

    A rank correlation of each with the worth of a trial. This takes in the trials that were pruned, below all that were
    measured, and those that diverged, below these. As a search goes on its trials get better, and all its values drift
    to where the good ones were, those without an effect too: so what goes with the number of the trial (a parabola) is
    taken out of both. What is left counts where it is above the highest that any has in 95 % of shuffles. (Optuna's
    PED-ANOVA found less, and more that is not there.) What is best in the middle of its range is not seen.
    """
    values = {f.name: [getattr(row.hyp, f.name) for row in trials] for f in dataclasses.fields(Hyp)}
    names = [name for name, column in values.items() if len(set(column)) > 1]
    if len(trials) < FEWEST or not names:
        return None
    ends = ("diverged", "pruned", "measured")
    worth = [(ends.index(row.end), -np.inf if row.objective is None else row.objective) for row in trials]
    order = sorted(range(len(trials)), key=lambda i: worth[i])
    numbers = np.arange(len(trials)) / len(trials)
    drift = np.stack((np.ones(len(trials)), numbers, numbers**2), 1)
    columns = _without(drift, _ranks(np.array([values[name] for name in names]).T))
    worths = _without(drift, np.argsort(order)[:, None].astype(float))[:, 0]
    rng = np.random.default_rng(0)
    chance = [abs(rng.permutation(worths) @ columns).max() for _ in range(_SHUFFLES)]
    found = zip(names, (worths @ columns).tolist(), strict=True)
    mattered = [Knob(name, value) for name, value in found if abs(value) > np.quantile(chance, _CHANCE)]
    return sorted(mattered, key=lambda knob: -abs(knob.correlation))


def _ranks(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each column's values by their place in its order."""
    return columns.argsort(0, kind="stable").argsort(0).astype(float)


def _without(drift: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each column without what `drift` explains of it, at length 1."""
    left = columns - drift @ np.linalg.lstsq(drift, columns, rcond=None)[0]
    return left / np.maximum(np.linalg.norm(left, axis=0), 1e-12)
