"""Result table of an export: size, time, mAP and its loss, differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tessera.deploy.exporting.parity.difference import Difference
from tessera.utils.evaluation.average_precision import LEVEL, ROUNDS, bootstrap_interval, resampled
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.seeding import sample_rng

_COLUMNS = ("file", "MB", "ms", "mAP50-95", "lost", "boxes, px", "scores", "matched", "dtypes")


class Accuracy(NamedTuple):
    """mAP50-95 and its drop below the reference, each with a 95 % bootstrap interval.

    The interval of the drop resamples the same images for both: it is far narrower than those of the two mAPs.
    """

    map: float
    interval: tuple[float, float]
    drop: float
    drop_interval: tuple[float, float]


def accuracy(found: Evaluation, reference: Evaluation) -> Accuracy:
    """Return the accuracy of a file beside that of its network on the same images."""
    interval = bootstrap_interval(found.ranking, sample_rng(0, 0, 0, "bootstrap")).map
    before, after = (
        resampled(each.ranking, sample_rng(0, 0, 0, "bootstrap"), ROUNDS).maps()[1] for each in (reference, found)
    )
    drops, tail = before - after, (1 - LEVEL) / 2
    known = drops[np.isfinite(drops)]
    low, high = np.quantile(known, (tail, 1 - tail)).tolist() if len(known) else (np.nan, np.nan)
    return Accuracy(found.metrics.map, interval, reference.metrics.map - found.metrics.map, (low, high))


@dataclass(frozen=True)
class Row:
    """One file; None = not evaluated."""

    name: str
    megabytes: float
    dtypes: str  # of its tensors, such as "int8 98%, float32 2%"; "" = unknown
    milliseconds: float | None = None  # median per image, from pixels to boxes
    accuracy: Accuracy | None = None
    difference: Difference | None = None  # from its network
    failures: str = ""  # reasons for refusal; "" = none
    unverified: str = ""  # reason for which it was not verified; "" = verified

    def as_dict(self) -> dict[str, Any]:
        found, apart = self.accuracy, self.difference
        return {
            "name": self.name,
            "mb": self.megabytes,
            "dtypes": self.dtypes,
            "ms": self.milliseconds,
            "status": "refused" if self.failures else "unverified" if self.unverified else "verified",
            "reason": self.failures or self.unverified,
            "map": found and found.map,
            "map_interval": found and found.interval,
            "drop": found and found.drop,
            "drop_interval": found and found.drop_interval,
            "boxes_px": apart and apart.largest[0],
            "scores": apart and apart.largest[1],
            "matched": apart and apart.matched_fraction,
        }


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *values, dtypes in cells:
        aligned = (figure.rjust(width) for figure, width in zip(values, widths[1:-1], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *aligned, dtypes)).rstrip())
    return [*lines, *(f"{row.name}: not verified here: {row.unverified}" for row in rows if row.unverified)]


def _cells(row: Row) -> tuple[str, ...]:
    found, apart = row.accuracy, row.difference
    time = "" if row.milliseconds is None else f"{row.milliseconds:.1f}"
    map_text = "" if found is None else _interval(found.map, found.interval)
    lost = "" if found is None or apart is None else _interval(found.drop, found.drop_interval)
    differences = ("", "", "")
    if apart is not None and apart.detections:
        box_px, score = apart.largest
        differences = (f"{box_px:.3g}", f"{score:.2g}", f"{apart.matched_fraction:.1%}")
    return (row.name, f"{row.megabytes:.1f}", time, map_text, lost, *differences, row.dtypes)


def _interval(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f})"
