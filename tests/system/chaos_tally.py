"""What became of the strikes of a campaign, kept in a file so that the campaign can be interrupted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ("start", "scan", "step", "validation", "save", "end")


@dataclass
class Tally:
    """Counts, and a line for each promise that was not kept."""

    life_s: float = 0.0
    strikes: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    fresh: int = 0
    finished: int = 0
    equal: int = 0
    slowest_s: float = 0.0
    hangs: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    not_resumed: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        wrong = (self.hangs, self.unnamed, self.not_resumed, self.corrupt, self.left_over)
        return not any(wrong) and self.equal == self.finished > 0

    def table(self) -> str:
        rows: list[tuple[str, object]] = [("strikes", self.strikes)]
        rows += [(f"  in {phase}", self.phases[phase]) for phase in PHASES]
        rows += [(f"  {kind}", count) for kind, count in sorted(self.kinds.items())]
        rows += [("went on from a checkpoint", self.resumed), ("nothing saved yet: began anew", self.fresh)]
        rows += [("runs finished", self.finished), ("  with the undisturbed run's bits", self.equal)]
        rows += [("slowest end after a strike, seconds", f"{self.slowest_s:.0f}")]
        rows += [("hangs", len(self.hangs)), ("ends without a message, or with a traceback", len(self.unnamed))]
        rows += [("did not go on", len(self.not_resumed)), ("corrupt checkpoints", len(self.corrupt))]
        rows += [("left-over processes, segments, files", len(self.left_over))]
        return "\n".join(f"{name:<48}{value:>6}" for name, value in rows)

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(self), indent=1))
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Tally:
        """What was saved before; an empty one where nothing was."""
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text())
        return cls(**{**found, "phases": Counter(found["phases"]), "kinds": Counter(found["kinds"])})
