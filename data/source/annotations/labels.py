"""Label files: rows `class x y w h` or `class x1 y1 x2 y2 …`, fractions of the image's width and height.

A row of class -1 is a region to ignore: neither object nor background.

A file of nothing but correct boxes takes a fast path; any other is read row by row with line numbers. Both give equal
objects.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BOX_FIELDS = ("x", "y", "w", "h")
_MAX_CLASS = 2**31 - 1
ANY_CLASS = -1  # of a region that is about every class

Size = tuple[int, int]


class Regions(NamedTuple):
    """Ignored regions, neither object nor background: crowds, difficult objects, ignored classes, rows of class -1.

    Attributes:
        classes: the class that each region is about; ANY_CLASS; -2 - k for an object of the dataset's k-th ignored
            class, which is about every class too. Behind these count classes that are left out: the scan drops them.
        boxes: as in ParsedLabels.
    """

    classes: list[int]
    boxes: list[float]


class ParsedLabels(NamedTuple):
    """The objects of one image, as its label file has them.

    Attributes:
        classes: class of each object.
        boxes: centre x, centre y, width, height of each object, end to end, fractions of the image.
        polygons: float64 (k, 2) xy fractions of each object, k = 0 for an object with a box only; () where all are.
        duplicates: rows equal to an earlier one, which are left out.
        problems: (line, what) of each row that cannot be used; line None is the whole file.
        unknown: (line, class) of each row whose class the dataset does not name.
        ignored: regions that are neither object nor background; () where there are none.
        remarks: (line, what) of what is left out while the image is kept.
        lines: where each object is.
        stated_hw: the image's height and width, as the labels state them; (0, 0) where they do not.
    """

    classes: list[int]
    boxes: list[float]
    polygons: list[NDArray[np.float64]] | tuple[()] = ()
    duplicates: int = 0
    problems: list[tuple[int | None, str]] | tuple[()] = ()
    unknown: list[tuple[int, str]] | tuple[()] = ()
    ignored: Regions | tuple[()] = ()
    remarks: list[tuple[int | None, str]] | tuple[()] = ()
    lines: Sequence[int] = ()
    stated_hw: Size = (0, 0)


@dataclass
class Rows:
    """The objects of one image while its rows are read, equal ones once; fields as in ParsedLabels."""

    classes: list[int] = field(default_factory=list)
    boxes: list[float] = field(default_factory=list)
    polygons: list[NDArray[np.float64]] = field(default_factory=list)
    duplicates: int = 0
    problems: list[tuple[int | None, str]] = field(default_factory=list)
    unknown: list[tuple[int, str]] = field(default_factory=list)
    ignored: Regions = field(default_factory=lambda: Regions([], []))
    remarks: list[tuple[int | None, str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    _seen: set[tuple[float | str, ...]] = field(default_factory=set)

    def add(
        self,
        line: int,
        key: tuple[float | str, ...],
        class_id: int,
        box: Sequence[float],
        polygon: NDArray[np.float64] | None = None,
    ) -> None:
        """Add an object, unless one of an equal `key` is there already; or the region of an ignored class."""
        if class_id < 0:
            self.ignore(class_id, box)
            return
        if key in self._seen:
            self.duplicates += 1
            return
        self._seen.add(key)
        self.classes.append(class_id)
        self.boxes.extend(box)
        self.lines.append(line)
        self.polygons.append(np.zeros((0, 2)) if polygon is None else polygon)

    def leave_out(self, line: int, what: str) -> None:
        """Leave out an object; with the only one goes the image, which would seem to be background."""
        self.left_out.append((line, what))

    def ignore(self, class_id: int, box: Sequence[float]) -> None:
        """Add an ignored region."""
        self.ignored.classes.append(class_id)
        self.ignored.boxes.extend(box)

    def parsed(self) -> ParsedLabels:
        """What was read."""
        if self.classes:
            self.remarks += [(line, f"{what}; the object is left out") for line, what in self.left_out]
        else:
            self.problems += self.left_out
        polygons = self.polygons if any(map(len, self.polygons)) else ()
        ignored = self.ignored if self.ignored.classes else ()
        return ParsedLabels(
            self.classes,
            self.boxes,
            polygons,
            self.duplicates,
            self.problems,
            self.unknown,
            ignored,
            self.remarks or (),
            self.lines,
        )


def parse_labels(raw: bytes, nc: int, classes: Sequence[int] = ()) -> ParsedLabels:
    """Read a label file.

    Args:
        raw: its bytes. A byte-order mark, Windows or old Mac line ends and blank lines are accepted.
        nc: number of classes, the ignored ones included.
        classes: what the first numbers of a file stand for, as in `Regions` those that are ignored or left out; ()
            where every number is its class.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw[3:]
    return (None if classes else _parse_plain(raw, nc)) or parse_rows(raw, nc, classes)


def _parse_plain(raw: bytes, nc: int) -> ParsedLabels | None:
    """The fast path; None where anything is unusual."""
    rows = [line.split() for line in raw.splitlines()]
    if b"_" in raw or any(len(row) != 5 for row in rows):  # Python's numbers may have underscores, labels may not
        return None
    if not rows:
        return ParsedLabels([], [])
    tokens = raw.split()
    try:
        classes = [int(token) for token in tokens[::5]]
        del tokens[::5]
        boxes = [float(token) for token in tokens]
    except ValueError:
        return None
    # Comparisons let NaN pass, the sum does not.
    if min(boxes) < 0 or max(boxes) > 1 or math.isnan(sum(boxes)) or min(classes) < 0 or max(classes) >= nc:
        return None
    if len(rows) > 1 and len(set(zip(classes, boxes[::4], boxes[1::4], boxes[2::4], boxes[3::4], strict=True))) < len(
        rows
    ):
        return None
    return ParsedLabels(classes, boxes, lines=range(1, len(rows) + 1))


def parse_rows(raw: bytes, nc: int, classes: Sequence[int] = ()) -> ParsedLabels:
    """Row by row: as `parse_labels`, without a byte-order mark."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ParsedLabels([], [], problems=[(None, "the text is UTF-16, expected UTF-8. Save it as UTF-8")])
    rows = Rows()
    for number, line in enumerate(raw.splitlines(), 1):
        tokens = line.split()
        if not tokens:
            continue
        row = _read_row(tokens)
        if isinstance(row, str):
            rows.problems.append((number, row))
        elif row[0] >= nc:
            rows.unknown.append((number, f"{row[0]:.0f}"))
        else:
            class_id = classes[int(row[0])] if 0 <= row[0] < len(classes) else int(row[0])
            points = np.array(row[1:] if len(row) > 5 else ()).reshape(-1, 2)
            rows.add(number, (class_id, *row[1:]), class_id, polygon_box(points) if len(points) else row[1:], points)
    return rows.parsed()


def polygon_box(points: NDArray[np.float64]) -> list[float]:
    """Centre and size of the box around a polygon (k, 2)."""
    low, high = points.min(0), points.max(0)
    return [*((low + high) / 2).tolist(), *(high - low).tolist()]


def _read_row(tokens: list[bytes]) -> tuple[float, ...] | str:
    """The numbers of a row, or what is wrong with it."""
    count = len(tokens)
    if count != 5 and (count < 7 or count % 2 == 0):
        noun = "field" if count == 1 else "fields"
        return (
            f"{count} {noun}, expected 5 (class x y w h) or a class and at least 3 points (class x1 y1 x2 y2 x3 y3 …)"
        )
    row: list[float] = []
    for place, token in enumerate(tokens):
        try:
            if b"_" in token:
                raise ValueError
            value = float(token)
        except ValueError:
            return f"'{_shown(token)}' is not a number"
        name = "class" if place == 0 else _field_name(place, count)
        if not math.isfinite(value):
            return f"{name} is {_shown(token)}, expected a finite number"
        if place == 0 and (value != int(value) or not ANY_CLASS <= value <= _MAX_CLASS):
            return f"class is {_shown(token)}, expected an integer from 0 on, or -1 for a region to ignore"
        if place > 0 and value < 0:
            return f"{name} is {_shown(token)}, expected no negative value"
        if place > 0 and value > 1:
            return f"{name} is {_shown(token)}, expected at most 1 (a fraction of the image's width or height)"
        row.append(value)
    return tuple(row)


def _field_name(place: int, count: int) -> str:
    """What the number at `place` of a row of `count` fields is."""
    return _BOX_FIELDS[place - 1] if count == 5 else f"{'xy'[(place - 1) % 2]}{(place + 1) // 2}"


def _shown(token: bytes) -> str:
    """A token of a file, short and printable."""
    text = token.decode("utf-8", "backslashreplace")
    return (
        (text if len(text) <= 24 else text[:24] + "…")
        .encode("unicode_escape" if not text.isprintable() else "utf-8")
        .decode()
    )


def clipped_fractions(left: float, top: float, right: float, bottom: float, size_hw: Size) -> list[float] | None:
    """Centre and size as fractions of the image, after cutting the box to it; None where nothing is left."""
    height, width = size_hw
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if right < left or bottom < top:
        return None
    return [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]
