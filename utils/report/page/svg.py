"""Charts as SVG: no colour is set here but by classes of page.css, so that they follow light, dark and print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
POINTS = 250  # of a line: a pixel or two has one


def line_chart(
    title: str,
    x: NDArray[Any],
    series: Mapping[str, NDArray[Any]],
    *,
    x_label: str,
    mark: float | None = None,
    in_powers: bool = False,
) -> Markup:
    """Lines over one axis, with their values for page.js to show under the pointer.

    Args:
        title: what is shown, for those who cannot see it.
        x: (K,), ascending.
        series: (K,) by name; what is not finite is a gap.
        x_label: name of the axis.
        mark: where on it something is marked; not of an axis in powers.
        in_powers: whether the axis has equal room for each power of two.
    """
    keep = thinned(len(x))
    x = np.asarray(x, np.float64)[keep]
    values = {name: np.asarray(column, np.float64)[keep] for name, column in series.items()}
    finite = np.concatenate([np.zeros(0), *(column[np.isfinite(column)] for column in values.values())])
    low, high = _bounds(finite)
    places = np.log2(x) if in_powers else x
    x_low, x_high = float(places[0]), float(places[-1])
    if len(x) == 1:
        x_low, x_high = x_low - 1, x_high + 1

    def across(place: float) -> float:
        return LEFT + (place - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks(low, high):
        y = f"{up(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in ticks(x_low, x_high):
        text = f"{2**tick if in_powers else tick:.4g}"
        parts.append(f'<text class="tick" x="{across(tick):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) // 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    if mark is not None:
        at = f"{across(mark):.1f}"
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for number, column in enumerate(values.values()):
        for run in _runs(np.isfinite(column)):
            points = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in zip(places[run], column[run], strict=True))
            dot = f'<circle class="dot s{number}" cx="{points.split(",")[0]}" cy="{points.split(",")[-1]}" r="3"/>'
            line = f'<polyline class="line s{number}" points="{points}"/>'
            parts.append(line if run.stop - run.start > 1 else dot)
    held = {
        "x": [round(float(value), 6) for value in x],
        "at": [round(across(value), 1) for value in places],
        "series": [[name, [_short(value) for value in column]] for name, column in values.items()],
        "axis": x_label,
    }
    legend = "".join(
        f'<span class="key"><svg viewBox="0 0 24 8" aria-hidden="true"><line class="line s{i}" x1="0" x2="24" y1="4" '
        f'y2="4"/></svg>{escape(name)}</span>'
        for i, name in enumerate(values)
    )
    drawn = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(title)}" '
        f'data-chart="{escape(json.dumps(held))}">{"".join(parts)}<line class="cursor" hidden="hidden" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"/></svg><p class="legend">{legend} <output></output></p>'
    )
    return Markup(drawn)  # every text in it is escaped above


def bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """A row of a table as a bar: shares of its width by their classes of page.css. Its numbers stand beside it."""
    drawn, left = [], 0.0
    for kind, share in parts:
        width = 100 * min(max(share, 0.0), 1.0)
        if width:
            drawn.append(f'<rect class="{escape(kind)}" x="{left:.2f}" width="{width:.2f}" height="10"/>')
        left += width
    return Markup(
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'
    )


def thinned(count: int, most: int = POINTS) -> NDArray[np.int64]:
    """Rows of `count` that are kept: all, or so many, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from `low` to `high`."""
    step = 10.0 ** np.floor(np.log10(high - low))
    step = next(step * part for part in (0.2, 0.25, 0.5, 1, 2) if (high - low) / (step * part) <= 5.5)
    first = np.ceil(low / step - 1e-9)
    return [float(f"{value * step:.10g}") + 0.0 for value in np.arange(first, np.floor(high / step + 1e-9) + 1)]


def _bounds(finite: NDArray[np.float64]) -> tuple[float, float]:
    """From 0 to above the largest value, or around them where they are below 0; never of no length."""
    if finite.size == 0:
        return 0.0, 1.0
    low, high = min(float(finite.min()), 0.0), max(float(finite.max()), 0.0)
    return (low, low + (high - low) * 1.05) if high > low else (0.0, 1.0)


def _runs(known: NDArray[np.bool_]) -> list[slice]:
    """Where what is known stands together."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], known.view(np.int8), [0]))))
    return [slice(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
