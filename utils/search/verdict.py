"""Whether sets of hyperparameters are better than the one that a search began with.

The best of many trainings was partly lucky. So the best sets and the start are trained again, with seeds that the
search has not seen, all of them with the same ones. What is left of a gain is judged against the noise of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SEEDS = 3  # with which a set is trained again
LEVEL = 0.95  # of the intervals of all sets together
_ROUNDS = 200_000


class Gain(NamedTuple):
    """What a set gains over the start."""

    mean: float  # over the seeds
    margin: float  # half the width of its interval; infinite where there are too few seeds for one

    @property
    def is_better(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.mean > self.margin


class Standing(NamedTuple):
    """How a set did when it was trained again."""

    mean: float  # of its values; NaN where it has none
    diverged: int  # how many of its trainings did
    gain: Gain | None = None  # over the start; None of the start itself, and where a training of either diverged


def judge(values: Mapping[tuple[int, int], float], sets: int) -> list[Standing]:
    """How the start, set 0, and the sets from 1 on stand.

    Args:
        values: by set and seed, from 1; a training that diverged has none.
        sets: how many there are beside the start.
    """
    table = np.array([[values.get((s, k), np.nan) for k in range(1, SEEDS + 1)] for s in range(sets + 1)])
    measured = np.isfinite(table)
    found = [
        Standing(float(row[there].mean()) if there.any() else np.nan, int((~there).sum()))
        for row, there in zip(table, measured, strict=True)
    ]
    whole = [s for s in range(1, sets + 1) if measured[s].all()]
    if whole and measured[0].all():
        for s, gain in zip(whole, gains(table[0], table[whole]), strict=True):
            found[s] = found[s]._replace(gain=gain)
    return found


def gains(start: NDArray[np.float64], sets: NDArray[np.float64]) -> list[Gain]:
    """What sets gain over the start, with intervals that hold for all sets at once in 95 % of cases.

    The noise is what neither the set nor the seed explains, pooled over all trainings; the margin is its standard error
    of a difference times Dunnett's critical value (1955), never below 2.

    Args:
        start: values of the start set (S,), one a seed.
        sets: values of the other sets (K, S), of the same seeds.
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
    """How many standard errors a difference from the start must be beyond, for `sets` comparisons at once.

    Sampled: the distribution has no closed form. `freedom` are the degrees of freedom of the noise.
    """
    rng = np.random.default_rng(0)
    means = rng.standard_normal((_ROUNDS, sets + 1))
    scale = np.sqrt(2 * rng.chisquare(freedom, _ROUNDS) / freedom)
    return max(2.0, float(np.quantile(abs(means[:, 1:] - means[:, :1]).max(1) / scale, LEVEL)))
