"""What a search makes as large as it can: a figure of a validation, or several, added and multiplied.

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

FIGURES = ("fitness", "map", "map50", "precision", "recall", "f1", "ms")
FIGURES_AT = ("recall@p", "precision@r")  # each at a share from 0 to 1: recall@p=0.95
_AT = re.compile(rf"({'|'.join(FIGURES_AT)})\s*=\s*([\d.]+)")
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_LONGEST = 200
_EXPECTED = (
    f'expected numbers and figures, joined by + - * / and parentheses, such as "map - 0.01*ms". Figures: '
    f"{', '.join(FIGURES)}, {' and '.join(f'{name}=0.95' for name in FIGURES_AT)}."
)


class Figure(NamedTuple):
    """A figure of a validation: its name, and the share it is measured at where it has one."""

    name: str
    at: float | None = None


@dataclass(frozen=True)
class Objective:
    """A formula, checked."""

    figures: dict[str, Figure]  # by the names that the formula has for them
    _formula: ast.expr

    def value(self, measure: Callable[[Figure], float]) -> float:
        """The value, of figures that `measure` gives; NaN where something is divided by 0."""
        try:
            return _value(self._formula, {name: measure(figure) for name, figure in self.figures.items()})
        except ZeroDivisionError:
            return math.nan


def parse_objective(text: str) -> Objective:
    """Read an objective. Nothing of it is run: what is no number, no figure and no + - * / is refused.

    Raises:
        ConfigError: names what is wrong.
    """
    where = f"--objective {shown(text)}"
    figures: dict[str, Figure] = {name: Figure(name) for name in FIGURES}

    def named(match: re.Match[str]) -> str:
        figure = Figure(match[1], _share(match, where))
        name = f"AT_{len(figures)}"  # in capitals: no name that a user could write
        figures[name] = figure
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
        usual = _value(formula, {name: 0.31 + 0.017 * number for number, name in enumerate(figures)})
    except _NotAllowed as error:
        hint = did_you_mean(str(error), FIGURES)
        raise ConfigError(f"{where}: found {shown(str(error))}, {_EXPECTED}{hint}") from error
    except ZeroDivisionError:
        usual = math.nan
    used = {node.id for node in ast.walk(formula) if isinstance(node, ast.Name)}
    if not used:
        raise ConfigError(f"{where}: no figure in it, so that every training is worth the same; {_EXPECTED}")
    if not math.isfinite(usual):
        raise ConfigError(f"{where}: it divides by 0 or is too large, whatever is measured; {_EXPECTED}")
    return Objective({name: figure for name, figure in figures.items() if name in used}, formula)


def _share(match: re.Match[str], where: str) -> float:
    try:
        share = float(match[2])
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: found {shown(match[0])}, expected a number above 0 and at most 1 after the =.")
    return share


class _NotAllowed(Exception):
    """A part of a formula that is not in the grammar."""


def _value(node: ast.expr, figures: dict[str, float]) -> float:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, figures), _value(right, figures))
        case ast.UnaryOp(op, operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand, figures))
        case ast.Name(name) if name in figures:
            return figures[name]
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and abs(value) < 1e9:
            return float(value)
    raise _NotAllowed(ast.unparse(node))
