"""search.md: whether a search has found something better, and which hyperparameters mattered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.utils.search.folder import BEST
from tessera.utils.search.knobs import FEWEST, Knob
from tessera.utils.search.table import Row
from tessera.utils.search.verdict import Gain, Standing


@dataclass(frozen=True)
class Report:
    """What a search came to.

    Attributes:
        objective: as it was given.
        trials: that have ended.
        sets: that were trained again, the best first.
        standings: of the start, then of each set, after that.
        knobs: the hyperparameters that mattered; None with too few trials to tell.
    """

    objective: str
    trials: Sequence[Row]
    sets: Sequence[Row]
    standings: Sequence[Standing]
    knobs: Sequence[Knob] | None

    @property
    def winner(self) -> Row | None:
        """The set that is better than the start, of several the one that gains most; None where none is."""
        better = [(gain.mean, row) for row, gain in self._compared() if gain.is_better]
        return max(better, key=lambda pair: pair[0])[1] if better else None

    def summary(self) -> str:
        """The verdict, in a line."""
        if not self.sets:
            return f"Nothing to compare: no trial but the start's has a result. {BEST} has the start."
        if self.winner is None:
            return f"Not better: no set gains more over the start than chance would give it. {BEST} has the start."
        (gain,) = (gain for row, gain in self._compared() if row is self.winner)
        return f"Better: trial {self.winner.number} gains {_interval(gain)} over the start. {BEST} has its set."

    def text(self) -> str:
        """The whole page."""
        ends = Counter(row.end for row in self.trials)
        counts = ", ".join(f"{count} {end}" for end, count in ends.items())
        lines = [
            "# Search",
            "",
            f"**{self.summary()}**",
            "",
            f"Objective: `{self.objective}`, the higher the better. {len(self.trials)} trials: {counts}.",
        ]
        return "\n".join([*lines, *self._again(), *self._mattered()]) + "\n"

    def _compared(self) -> list[tuple[Row, Gain]]:
        return [(row, s.gain) for row, s in zip(self.sets, self.standings[1:], strict=True) if s.gain is not None]

    def _again(self) -> list[str]:
        """The table of the sets that were trained again."""
        if not self.sets:
            return []
        lines = [
            "",
            "## Again, with other seeds",
            "",
            "The best of many trials was partly lucky, so the best sets and the start were trained again with seeds",
            "that the search had not used, each set with the same ones. The intervals hold for all sets together in",
            "95 % of cases; a set is better where the whole of its interval is above 0.",
            "",
            "| set | in the search | again | gain | |",
            "| --- | --- | --- | --- | --- |",
            f"| start | | {self.standings[0].mean:.4f} | | |",
        ]
        for row, standing in zip(self.sets, self.standings[1:], strict=True):
            gain = standing.gain
            word = "diverged" if gain is None else ("better" if gain.is_better else "not better")
            cells = f"{row.objective:.4f} | {standing.mean:.4f} | {_interval(gain) if gain else ''}"
            lines.append(f"| trial {row.number} | {cells} | {word} |")
        return lines

    def _mattered(self) -> list[str]:
        lines = ["", "## Which hyperparameters mattered", ""]
        if self.knobs is None:
            return [*lines, f"Too few trials to tell; it takes {FEWEST} at least."]
        if not self.knobs:
            return [*lines, "None beyond chance."]
        lines += ["| | better | rank correlation |", "| --- | --- | --- |"]
        words = {knob.name: "higher" if knob.correlation > 0 else "lower" for knob in self.knobs}
        return [*lines, *(f"| `{knob.name}` | {words[knob.name]} | {knob.correlation:+.2f} |" for knob in self.knobs)]


def _interval(gain: Gain) -> str:
    return f"{gain.mean:+.4f} ({gain.mean - gain.margin:+.4f} to {gain.mean + gain.margin:+.4f})"
