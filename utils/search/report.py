"""evolve.csv, a line for each trial of a search; and search.md, which says whether it has found something better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tessera.utils.config import Hyp
from tessera.utils.files import atomic_write
from tessera.utils.search.search_directory import BEST
from tessera.utils.search.verdict import SEEDS, Gain, Standing
from tessera.utils.text import counted

_FIGURES = ("fitness", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95")


class Row(NamedTuple):
    """A trial that has ended."""

    number: int  # from 0
    end: str  # "measured"; "pruned", with what it had by then; "diverged", with what it had or nothing
    objective: float | None  # its value
    figures: Sequence[float]  # fitness, precision, recall, mAP50, mAP50-95
    hyp: Hyp

    @classmethod
    def of(cls, trial: Any, hyp: Hyp) -> Row:
        """A trial of Optuna."""
        figures = trial.user_attrs.get("figures") or (0.0,) * len(_FIGURES)
        return cls(trial.number, trial.user_attrs.get("end", "measured"), trial.value, figures, hyp)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write evolve.csv, whole or not at all; its columns have the names of YOLOv5's table."""
    table = pd.DataFrame(
        {
            "generation": row.number,
            **dict(zip(_FIGURES, row.figures, strict=True)),
            "objective": row.objective,
            "end": row.end,
            **vars(row.hyp),
        }
        for row in rows
    )
    with atomic_write(path) as file:
        table.to_csv(file, index=False)


def best_first(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured, the highest objective first."""
    measured = [row for row in rows if row.end == "measured" and row.objective is not None]
    return sorted(measured, key=lambda row: -(row.objective or 0.0))


@dataclass(frozen=True)
class Report:
    """What a search came to."""

    objective: str
    trials: Sequence[Row]  # that have ended
    sets: Sequence[Row]  # that were trained again, the best first
    standings: Sequence[Standing]  # of the start, then of each set, after that

    @property
    def winner(self) -> Row | None:
        """The set to use: of those better than the start the best; None where there is none, and the start stays.

        Where a training of the start diverged, the best of the sets of which none did.
        """
        lost = self.standings[0].diverged
        pairs = zip(self.sets, self.standings[1:], strict=True)
        good = [(s.mean, row) for row, s in pairs if (s.gain.is_better if s.gain else lost and not s.diverged)]
        return max(good, key=lambda pair: pair[0])[1] if good else None

    def summary(self) -> str:
        """The verdict, in a line."""
        if not self.sets:
            return f"Nothing to compare: no set but the start has a result. {BEST} has the start."
        start, winner = self.standings[0], self.winner
        if start.diverged:
            others = f"trial {winner.number} with none" if winner else "every set with some"
            why = f"the start diverged with {start.diverged} of {SEEDS} seeds, {others}"
        elif winner:
            gain = self.standings[1 + self.sets.index(winner)].gain
            why = f"trial {winner.number} gains {_interval(gain)} over the start"
        else:
            why = "no set gains more over the start than chance would give it"
        return f"Better: {why}. {BEST} has its set." if winner else f"Not better: {why}. {BEST} has the start."

    def text(self) -> str:
        """The whole page."""
        ends = ", ".join(f"{count} {end}" for end, count in Counter(row.end for row in self.trials).items())
        page = (
            f"# Search\n\n**{self.summary()}**\n\n"
            f"Objective: `{self.objective}`, the higher the better. {counted(len(self.trials), 'trial')}: {ends}.\n"
        )
        if not self.sets:
            return page
        names = ["start |", *(f"trial {row.number} | {row.objective:.4f}" for row in self.sets)]
        lines = (f"| {name} | {_again(s)} |\n" for name, s in zip(names, self.standings, strict=True))
        return f"{page}{_AGAIN}{''.join(lines)}"


_AGAIN = """
## Again, with other seeds

The best of many trials was partly lucky, so the best sets and the start were trained again with seeds
that the search had not used, each set with the same ones. The intervals hold for all sets together in
95 % of cases; a set is better where the whole of its interval is above 0.

| set | in the search | again | gain | |
| --- | --- | --- | --- | --- |
"""


def _again(standing: Standing) -> str:
    """Mean, gain and a word: the last three cells of a set's line."""
    mean, diverged, gain = standing
    word = f"diverged with {diverged} of {SEEDS} seeds" if diverged else ""
    if gain is not None:
        word = "better" if gain.is_better else "not better"
    return " | ".join(("" if math.isnan(mean) else f"{mean:.4f}", _interval(gain), word))


def _interval(gain: Gain | None) -> str:
    return f"{gain.mean:+.4f} ({gain.mean - gain.margin:+.4f} to {gain.mean + gain.margin:+.4f})" if gain else ""
