"""Metric of `--metric`: a formula of validation metrics that best.pt, early stopping and `--evolve` maximise.

map                  recall@p=0.95                  map - 0.01*ms                  (map50 + recall) / 2
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import shown

METRICS = ("fitness", "map", "map50", "precision", "recall", "f1", "ms")
METRICS_AT = ("recall@p", "precision@r")  # each at a value from 0 to 1: recall@p=0.95
_AT = re.compile(rf"({'|'.join(METRICS_AT)})\s*=\s*([\d.]+)")
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_LONGEST = 200
_EXPECTED = (
    f'expected numbers and metrics joined by + - * / and parentheses, such as "map - 0.01*ms". Metrics: '
    f"{', '.join(METRICS)}, {' and '.join(f'{name}=0.95' for name in METRICS_AT)}."
)


class Metric(NamedTuple):
    """A validation metric, and for `recall@p=0.95` the value after the =."""

    name: str
    at: float | None = None


@dataclass(frozen=True)
class Objective:
    """A parsed formula."""

    metrics: dict[str, Metric]  # by their names in the formula
    _formula: ast.expr

    def value(self, measure: Callable[[Metric], float]) -> float:
        """Return the value for metrics that `measure` returns; NaN for a division by 0."""
        try:
            return _value(self._formula, {name: measure(metric) for name, metric in self.metrics.items()})
        except ZeroDivisionError:
            return math.nan


def parse_objective(text: str) -> Objective:
    """Parse a metric; it is never evaluated as Python.

    Raises:
        ConfigError: something other than numbers, metrics and + - * /.
    """
    where = f"--metric {shown(text)}"
    metrics: dict[str, Metric] = {name: Metric(name) for name in METRICS}

    def named(match: re.Match[str]) -> str:
        try:
            value = float(match[2])
        except ValueError:
            value = math.nan
        if not 0 < value <= 1:
            raise ConfigError(f"{where}: found {shown(match[0])}, expected a number above 0 and at most 1 after the =.")
        name = f"AT_{len(metrics)}"  # in capitals: the text is in lower case
        metrics[name] = Metric(match[1], value)
        return f" {name} "

    if re.search(r"map50\s*-\s*95", text.lower()):
        raise ConfigError(f"{where}: mAP50-95 is called map here; map50 - 95 would be a difference.")
    expression = _AT.sub(named, text[: _LONGEST + 1].lower()).strip()
    try:
        formula = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{where}: not a formula; {_EXPECTED}") from error
    if len(text) > _LONGEST:
        raise ConfigError(f"{where}: longer than {_LONGEST} characters; {_EXPECTED}")
    try:
        usual = _value(formula, {name: 0.31 + 0.017 * number for number, name in enumerate(metrics)})
    except _NotAllowed as error:
        hint = did_you_mean(str(error), METRICS)
        raise ConfigError(f"{where}: found {shown(str(error))}, {_EXPECTED}{hint}") from error
    except ZeroDivisionError:
        usual = math.nan
    used = {node.id for node in ast.walk(formula) if isinstance(node, ast.Name)}
    if not used:
        raise ConfigError(f"{where}: it has no metric, so every training would score the same; {_EXPECTED}")
    if not math.isfinite(usual):
        raise ConfigError(f"{where}: it divides by 0 or is too large for any metrics; {_EXPECTED}")
    return Objective({name: metric for name, metric in metrics.items() if name in used}, formula)


class _NotAllowed(Exception):
    """A part of a formula outside the grammar."""


def _value(node: ast.expr, metrics: dict[str, float]) -> float:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, metrics), _value(right, metrics))
        case ast.UnaryOp(op, operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand, metrics))
        case ast.Name(name) if name in metrics:
            return metrics[name]
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and abs(value) < 1e9:
            return float(value)
    raise _NotAllowed(ast.unparse(node))
