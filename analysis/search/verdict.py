"""Significance test of a search: are its best sets of hyperparameters better than the start?

The best of many trainings was partly lucky. So the best sets and the start are trained again, all with the same new
seeds, and a gain is compared with the noise of these trainings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SEEDS = 3  # repetitions of a set
LEVEL = 0.95  # simultaneous confidence of the intervals of all sets
_ROUNDS = 200_000


class Gain(NamedTuple):
    """Gain of a set over the start."""

    mean: float  # over the seeds
    margin: float  # half the width of the confidence interval; infinite with too few seeds

    @property
    def is_better(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.mean > self.margin


class Standing(NamedTuple):
    """Result of a set's repetitions."""

    mean: float  # objective; NaN without values
    diverged: int  # number of diverged trainings
    gain: Gain | None = None  # over the start; None for the start, and if a training of either diverged


def judge(values: Mapping[tuple[int, int], float], sets: int) -> list[Standing]:
    """Return the standings of the start (set 0) and of `sets` sets from 1 on.

    `values` are objectives by set (0 = the start) and seed, from 1; diverged trainings are missing.
    """
    table = np.array([[values.get((s, k), np.nan) for k in range(1, SEEDS + 1)] for s in range(sets + 1)])
    measured = np.isfinite(table)
    standings = [
        Standing(float(row[there].mean()) if there.any() else np.nan, int((~there).sum()))
        for row, there in zip(table, measured, strict=True)
    ]
    complete = [s for s in range(1, sets + 1) if measured[s].all()]
    if complete and measured[0].all():
        for s, gain in zip(complete, gains(table[0], table[complete]), strict=True):
            standings[s] = standings[s]._replace(gain=gain)
    return standings


def gains(start: NDArray[np.float64], sets: NDArray[np.float64]) -> list[Gain]:
    """Return the gains of sets (K, S) over the start (S,), S seeds, with simultaneous 95 % confidence intervals.

    The noise is the residual after the effects of set and seed, pooled over all trainings. The margin is the standard
    error of a difference times Dunnett's critical value (1955), which is at least 2.
    """
    values = np.vstack((start, sets))
    means = values.mean(1)
    freedom = (len(values) - 1) * (len(start) - 1)
    margin = np.inf
    if freedom > 0:
        noise = values - means[:, None] - values.mean(0) + values.mean()
        standard_error = np.sqrt(2 * (noise**2).sum() / freedom / len(start))
        margin = critical(len(sets), freedom) * standard_error
    return [Gain(float(mean), float(margin)) for mean in means[1:] - means[0]]


@cache
def critical(sets: int, freedom: int) -> float:
    """Return Dunnett's critical value for `sets` comparisons and `freedom` degrees of freedom, by sampling."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((_ROUNDS, sets + 1))
    scale = np.sqrt(2 * rng.chisquare(freedom, _ROUNDS) / freedom)
    return max(2.0, float(np.quantile(abs(means[:, 1:] - means[:, :1]).max(1) / scale, LEVEL)))
