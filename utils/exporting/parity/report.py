"""The table that an export ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.utils.exporting.parity.accuracy import Accuracy
from tessera.utils.exporting.parity.agreement import Agreement

_COLUMNS = ("file", "MB", "ms", "mAP50-95", "lost", "boxes, px", "scores", "matched", "numbers")


@dataclass(frozen=True)
class Row:
    """One file.

    Attributes:
        name: of the file.
        megabytes: its size.
        milliseconds: a picture, from pixels to boxes, the median; None where it was not run.
        accuracy: None where there is no dataset.
        agreement: with the network that it was made of; None for the network itself, and where it was not run.
        precision: of its tensors; "" where unknown.
        failures: why it is refused; "" where it is not.
        unverified: why it was not run, or says nothing; "" where it was.
    """

    name: str
    megabytes: float
    milliseconds: float | None = None
    accuracy: Accuracy | None = None
    agreement: Agreement | None = None
    precision: str = ""
    failures: str = ""
    unverified: str = ""


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for the console: the network first, then its files."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    lines = []
    for row in cells:
        aligned = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=False)),
        ]
        lines.append("  ".join((*aligned, row[-1])).rstrip())
    return [*lines, *(f"{row.name}: not verified here: {row.unverified}" for row in rows if row.unverified)]


def _cells(row: Row) -> tuple[str, ...]:
    found, near = row.accuracy, row.agreement
    figures = (
        ("", "")
        if found is None
        else (_interval(found.map, found.interval), _interval(found.drop, found.drop_interval))
    )
    if near is None:
        figures = (figures[0], "")
    apart = (
        ("", "", "")
        if near is None or not near.detections
        else (f"{near.box_px:.3g}", f"{near.score:.2g}", f"{near.share:.1%}")
    )
    time = "" if row.milliseconds is None else f"{row.milliseconds:.1f}"
    return (row.name, f"{row.megabytes:.1f}", time, *figures, *apart, row.precision)


def _interval(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f})"
