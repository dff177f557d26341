"""search.md: whether a search has found something better, and which hyperparameters mattered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.utils.search.folder import BEST
from tessera.utils.search.knobs import FEWEST, Knob
from tessera.utils.search.table import Row
from tessera.utils.search.verdict import SEEDS, Gain, Standing
from tessera.utils.text import counted


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
        """The set to use: of those better than the start the best; None where there is none, and the start stays.

        Where a training of the start diverged, the best of the sets of which none did.
        """
        lost = self.standings[0].diverged
        good = [(s.mean, row) for row, s in self._stand() if (s.gain.is_better if s.gain else lost and not s.diverged)]
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
            (gain,) = (s.gain for row, s in self._stand() if row is winner and s.gain)
            why = f"trial {winner.number} gains {_interval(gain)} over the start"
        else:
            why = "no set gains more over the start than chance would give it"
        return f"Better: {why}. {BEST} has its set." if winner else f"Not better: {why}. {BEST} has the start."

    def text(self) -> str:
        """The whole page."""
        ends = Counter(row.end for row in self.trials)
        counts = ", ".join(f"{count} {end}" for end, count in ends.items())
        lines = [
            "# Search",
            "",
            f"**{self.summary()}**",
            "",
            f"Objective: `{self.objective}`, the higher the better. {counted(len(self.trials), 'trial')}: {counts}.",
        ]
        return "\n".join([*lines, *self._again(), *self._mattered()]) + "\n"

    def _stand(self) -> list[tuple[Row, Standing]]:
        return list(zip(self.sets, self.standings[1:], strict=True))

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
            f"| start | | {_again(self.standings[0])} |",
        ]
        return [*lines, *(f"| trial {row.number} | {row.objective:.4f} | {_again(s)} |" for row, s in self._stand())]

    def _mattered(self) -> list[str]:
        lines = ["", "## Which hyperparameters mattered", ""]
        if self.knobs is None:
            return [*lines, f"Too few trials to tell; it takes {FEWEST} at least."]
        if not self.knobs:
            return [*lines, "None beyond chance."]
        lines += ["| | better | rank correlation |", "| --- | --- | --- |"]
        words = {knob.name: "higher" if knob.correlation > 0 else "lower" for knob in self.knobs}
        return [*lines, *(f"| `{knob.name}` | {words[knob.name]} | {knob.correlation:+.2f} |" for knob in self.knobs)]


def _again(standing: Standing) -> str:
    """Mean, gain and a word: the last three cells of a set's line."""
    mean, diverged, gain = standing
    word = f"diverged with {diverged} of {SEEDS} seeds" if diverged else ""
    if gain is not None:
        word = "better" if gain.is_better else "not better"
    figures = "" if math.isnan(mean) else f"{mean:.4f}", _interval(gain) if gain else ""
    return " | ".join((*figures, word))


def _interval(gain: Gain) -> str:
    return f"{gain.mean:+.4f} ({gain.mean - gain.margin:+.4f} to {gain.mean + gain.margin:+.4f})"
