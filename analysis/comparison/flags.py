"""Flags of compare.py, and the limits of `--require`: `map >= -0.01`."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import NamedTuple

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.flags.options import option
from tessera.utils.flags.program import called
from tessera.utils.flags.val import EvaluationConfig
from tessera.utils.text import shown

_SIDE = "several run directories, checkpoints or exported files of one kind, e.g. seeds of one training"
METRICS = ("map", "map50", "precision", "recall", "ms", "mb")
WITH_INTERVAL = ("map", "map50")
_ENDS = ("low", "high")
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class Requirement(NamedTuple):
    """Limit on a difference B − A."""

    text: str  # as given
    metric: str  # one of `METRICS`
    end: str  # "low" or "high" end of the 95 % interval, or "" for the difference itself
    comparison: str  # ">=", "<=", ">" or "<"
    limit: float

    def allows(self, value: float) -> bool:
        """Return whether a difference meets the limit; NaN does not."""
        return bool(_COMPARISONS[self.comparison](value, self.limit))


def parsed_requirement(text: str) -> Requirement:
    """Parse a requirement.

    Raises:
        ConfigError: another form, or an unknown metric.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            f'--require: found {shown(text)}, expected a metric, a comparison and a number, such as "map >= -0.01". '
            f"Metrics: {', '.join(METRICS)}; comparisons: {', '.join(_COMPARISONS)}."
        )
    word, comparison, limit = found.groups()
    metric, dot, end = word.partition(".")
    if metric not in METRICS:
        raise ConfigError(
            f"--require {shown(text)}: {shown(metric)} is not a metric.{did_you_mean(metric, METRICS)} Known: "
            f"{', '.join(METRICS)}; map.low, map.high, map50.low and map50.high are ends of the 95 % interval."
        )
    if dot and (end not in _ENDS or metric not in WITH_INTERVAL):
        raise ConfigError(
            f"--require {shown(text)}: {shown(word)} is unknown. Only map and map50 have an interval: map.low, "
            "map.high, map50.low and map50.high."
        )
    return Requirement(text.strip(), metric, end, comparison, float(limit))


@dataclass(frozen=True)
class CompareConfig(EvaluationConfig):
    """Compare detector A with detector B on the same images."""

    program = "compare.py"
    weights_fields = ("a", "b")

    models: tuple[str, ...] = option(
        (),
        "A and B: each a run directory, checkpoint, published file by name (--list-weights) or exported file",
        positional="MODEL",
    )
    a: tuple[str, ...] = option((), f"side A: {_SIDE}", many=True)
    b: tuple[str, ...] = option((), "side B; differences are B − A", many=True)
    require: tuple[str, ...] = option(
        (), 'exit with 1 if a difference violates a limit, such as "map >= -0.01" "ms <= 1"', many=True
    )
    project: str = option("runs/compare", "parent folder of run directories")

    def __post_init__(self) -> None:
        super().__post_init__()
        program = called(self.program)
        if self.models:
            count = len(self.models)
            if self.a or self.b or count != 2:
                beside = " beside --a and --b" if self.a or self.b else ""
                raise ConfigError(
                    f"{program}: found {count} MODEL{'S' * (count > 1)}{beside}, expected two, A and B; several of a "
                    "side are given as --a a1.pt a2.pt --b b1.pt b2.pt."
                )
            for side, model in zip(("a", "b"), self.models, strict=True):
                object.__setattr__(self, side, (model,))
            object.__setattr__(self, "models", ())
        if not (self.a and self.b):
            missing = "nothing to compare" if not (self.a or self.b) else f"no --{'b' if self.a else 'a'}"
            raise ConfigError(f"{program}: {missing}. Give two models: {program} A B, or --a A --b B.")
        _ = self.requirements

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Parsed `--require`."""
        return tuple(map(parsed_requirement, self.require))
