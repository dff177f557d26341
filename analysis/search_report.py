"""Files of a search: evolve.csv, and search.md, which tests whether the best sets are better than the start.

The best of many trainings was partly lucky. So the best sets and the start are trained again, all with the same new
seeds, and a gain is compared with the noise of these trainings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tessera.utils.config import Hyp
from tessera.utils.files import atomic_write
from tessera.utils.text import plural

BEST = "hyp_evolved.yaml"
SEEDS = 3  # repetitions of a set
LEVEL = 0.95  # simultaneous confidence of the intervals of all sets
_ROUNDS = 200_000
_METRICS = ("fitness", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95")


def write_table(path: Path, trials: Sequence[Any], hyps: Sequence[Hyp]) -> None:
    """Write evolve.csv atomically, with the column names of YOLOv5: a row for each ended Optuna trial."""
    table = pd.DataFrame(
        {
            "generation": trial.number,
            **dict(zip(_METRICS, trial.user_attrs.get("figures") or (0.0,) * len(_METRICS), strict=True)),
            "objective": trial.value,
            "end": trial.user_attrs.get("end", "measured"),
            **vars(hyp),
        }
        for trial, hyp in zip(trials, hyps, strict=True)
    )
    with atomic_write(path) as file:
        table.to_csv(file, index=False)


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


def verdict(sets: Sequence[Any], standings: Sequence[Standing]) -> tuple[Any | None, str]:
    """Return the trial with the best set that is better than the start, or None; and the verdict in one line.

    If the start diverged, a set that never did is better.

    Args:
        sets: trials that were trained again, the best first.
        standings: of the start and of each set in these trainings.
    """
    if not sets:
        return None, f"Nothing to compare: no set but the start has a result. {BEST} has the start."
    start, *others = standings
    better = [s for s in others if (s.gain.is_better if s.gain else start.diverged and not s.diverged)]
    if not better:
        reason = "no set gains more over the start than chance explains"
        if start.diverged:
            reason = f"the start diverged with {start.diverged} of {SEEDS} seeds, every set with some"
        return None, f"Not better: {reason}. {BEST} has the start."
    best = max(better, key=lambda standing: standing.mean)
    winner = sets[others.index(best)]
    reason = f"trial {winner.number} gains {_interval(best.gain)} over the start"
    if start.diverged:
        reason = f"the start diverged with {start.diverged} of {SEEDS} seeds, trial {winner.number} with none"
    return winner, f"Better: {reason}. {BEST} has its set."


def page(
    summary: str, objective: str, trials: Sequence[Any], sets: Sequence[Any], standings: Sequence[Standing]
) -> str:
    """Return search.md."""
    ends = ", ".join(f"{count} {end}" for end, count in Counter(trial.user_attrs["end"] for trial in trials).items())
    text = (
        f"# Search\n\n**{summary}**\n\n"
        f"Objective: `{objective}`, the higher the better. {plural(len(trials), 'trial')}: {ends}.\n"
    )
    if not sets:
        return text
    names = ["start |", *(f"trial {trial.number} | {trial.value:.4f}" for trial in sets)]
    lines = (f"| {name} | {_cells(s)} |\n" for name, s in zip(names, standings, strict=True))
    return f"{text}{_REPEATED}{''.join(lines)}"


_REPEATED = """
## Repeated with other seeds

The best of many trials was partly lucky. So the best sets and the start were trained again, all with the
same new seeds. The intervals hold for all sets together in 95 % of cases. A set is better if its whole
interval is above 0.

| set | in the search | repeated | gain | |
| --- | --- | --- | --- | --- |
"""


def _cells(standing: Standing) -> str:
    """Return mean, gain and verdict, the last three cells of a set's row."""
    mean, diverged, gain = standing
    verdict = f"diverged with {diverged} of {SEEDS} seeds" if diverged else ""
    if gain is not None:
        verdict = "better" if gain.is_better else "not better"
    return " | ".join(("" if math.isnan(mean) else f"{mean:.4f}", _interval(gain), verdict))


def _interval(gain: Gain | None) -> str:
    return f"{gain.mean:+.4f} ({gain.mean - gain.margin:+.4f} to {gain.mean + gain.margin:+.4f})" if gain else ""
