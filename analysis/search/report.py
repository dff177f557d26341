"""Files of a search: evolve.csv with a row per trial, and search.md with the comparison of the best sets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tessera.analysis.search.search_directory import BEST
from tessera.analysis.search.verdict import SEEDS, Gain, Standing
from tessera.utils.config import Hyp
from tessera.utils.files import atomic_write
from tessera.utils.text import plural

_METRICS = ("fitness", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95")


class Row(NamedTuple):
    """A trial that has ended."""

    number: int  # from 0
    end: str  # "measured", "pruned" or "diverged"
    objective: float | None
    metrics: Sequence[float]  # by `_METRICS`, of the last validation
    hyp: Hyp

    @classmethod
    def of(cls, trial: Any, hyp: Hyp) -> Row:
        """Return the row of an Optuna trial."""
        metrics = trial.user_attrs.get("figures") or (0.0,) * len(_METRICS)
        return cls(trial.number, trial.user_attrs.get("end", "measured"), trial.value, metrics, hyp)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write evolve.csv atomically, with the column names of YOLOv5."""
    table = pd.DataFrame(
        {
            "generation": row.number,
            **dict(zip(_METRICS, row.metrics, strict=True)),
            "objective": row.objective,
            "end": row.end,
            **vars(row.hyp),
        }
        for row in rows
    )
    with atomic_write(path) as file:
        table.to_csv(file, index=False)


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of complete trainings, the highest objective first."""
    measured = [row for row in rows if row.end == "measured" and row.objective is not None]
    return sorted(measured, key=lambda row: -(row.objective or 0.0))


@dataclass(frozen=True)
class Report:
    """Result of a search."""

    objective: str
    trials: Sequence[Row]
    sets: Sequence[Row]  # that were trained again, the best first
    standings: Sequence[Standing]  # of the start and of each set in these trainings

    @property
    def winner(self) -> Row | None:
        """Best of the sets that are better than the start (if that diverged, of those that never did), or None."""
        lost = self.standings[0].diverged
        pairs = zip(self.sets, self.standings[1:], strict=True)
        good = [(s.mean, row) for row, s in pairs if (s.gain.is_better if s.gain else lost and not s.diverged)]
        return max(good, key=lambda pair: pair[0])[1] if good else None

    def summary(self) -> str:
        """Return the verdict in one line."""
        if not self.sets:
            return f"Nothing to compare: no set but the start has a result. {BEST} has the start."
        start, winner = self.standings[0], self.winner
        if start.diverged:
            others = f"trial {winner.number} with none" if winner else "every set with some"
            reason = f"the start diverged with {start.diverged} of {SEEDS} seeds, {others}"
        elif winner:
            gain = self.standings[1 + self.sets.index(winner)].gain
            reason = f"trial {winner.number} gains {_interval(gain)} over the start"
        else:
            reason = "no set gains more over the start than chance explains"
        return f"Better: {reason}. {BEST} has its set." if winner else f"Not better: {reason}. {BEST} has the start."

    def text(self) -> str:
        """Return the page in Markdown."""
        ends = ", ".join(f"{count} {end}" for end, count in Counter(row.end for row in self.trials).items())
        page = (
            f"# Search\n\n**{self.summary()}**\n\n"
            f"Objective: `{self.objective}`, the higher the better. {plural(len(self.trials), 'trial')}: {ends}.\n"
        )
        if not self.sets:
            return page
        names = ["start |", *(f"trial {row.number} | {row.objective:.4f}" for row in self.sets)]
        lines = (f"| {name} | {_cells(s)} |\n" for name, s in zip(names, self.standings, strict=True))
        return f"{page}{_REPEATED}{''.join(lines)}"


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
