"""What `--require` asks of a comparison: `map >= -0.01`."""

from __future__ import annotations

import operator
import re
from typing import NamedTuple

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import shown

METRICS = ("map", "map50", "precision", "recall", "ms", "mb")
WITH_INTERVAL = ("map", "map50")
_ENDS = ("low", "high")
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class Requirement(NamedTuple):
    """A limit of a difference B − A.

    Attributes:
        text: as it was given.
        metric: one of `METRICS`.
        end: "low" or "high" end of the 95 % interval of the difference; "" for the difference as measured.
        comparison: ">=", "<=", ">" or "<".
        limit: the number that it is compared with.
    """

    text: str
    metric: str
    end: str
    comparison: str
    limit: float

    def allows(self, value: float) -> bool:
        """Whether a difference meets it; one that is not known, NaN, does not."""
        return bool(_COMPARISONS[self.comparison](value, self.limit))


def parsed_requirement(text: str) -> Requirement:
    """Read a requirement.

    Raises:
        ConfigError: it has another form, or asks for what is not measured.
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
            f"--require {shown(text)}: {shown(metric)} is no metric.{did_you_mean(metric, METRICS)} Known: "
            f"{', '.join(METRICS)}; map.low, map.high, map50.low and map50.high are ends of the 95 % interval."
        )
    if dot and (end not in _ENDS or metric not in WITH_INTERVAL):
        raise ConfigError(
            f"--require {shown(text)}: {shown(word)} is not known. Of map and map50 alone there is an interval, with "
            "the ends map.low, map.high, map50.low and map50.high."
        )
    return Requirement(text.strip(), metric, end, comparison, float(limit))
