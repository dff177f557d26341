"""Label files: rows `class x y w h` or `class x1 y1 x2 y2 …`, fractions of the image's width and height.

A row of class -1 is a region to ignore: neither object nor background. What lies beyond the image by a rounding error
is cut to it. A file of nothing but correct boxes takes a fast path; any other is read row by row.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.errors import LFS_POINTER, UTF_16, is_lfs_pointer
from tessera.utils.text import one_line

_BOX_FIELDS = ("x", "y", "w", "h")
_MAX_CLASS = 2**31 - 1
ANY_CLASS = -1  # of a region that is about every class
MOST_BEYOND = 0.01  # of a side, that a coordinate may lie beyond the image: it is cut, more is a mistake
_LONGEST_TOKEN = 25  # characters of a message
_NO_AREA = 1e-9  # of a side; rounding leaves so much of a box that ends where the image begins

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


@dataclass
class ParsedLabels:
    """The objects of one image, as its labels have them, equal ones once."""

    classes: list[int] = field(default_factory=list)  # class of each object
    boxes: list[float] = field(default_factory=list)  # centre x and y, width, height of each; fractions
    # (k, 2) xy fractions of each object, k = 0 for an object with a box only; [] where all are.
    polygons: list[NDArray[np.float64]] = field(default_factory=list)
    duplicates: int = 0  # rows equal to an earlier one, which are left out
    problems: list[tuple[int | None, str]] = field(default_factory=list)  # line of each unusable row; None: the file
    unknown: list[tuple[int, str]] = field(default_factory=list)  # line, class that is not named
    ignored: Regions = field(default_factory=lambda: Regions([], []))  # neither object nor background
    remarks: list[tuple[int | None, str]] = field(default_factory=list)  # left out; the image is kept
    lines: list[int] = field(default_factory=list)  # where each object is
    notes: list[tuple[int, str]] = field(default_factory=list)  # what costs nothing: a box that is cut
    stated_hw: Size = (0, 0)  # height and width of the image as the labels state them; (0, 0) where they do not
    # Remarks, or problems where no object is left: the image would seem to be background.
    left_out: list[tuple[int, str]] = field(default_factory=list)
    _seen: set[tuple[float | str, ...]] = field(default_factory=set, compare=False)

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
        elif key in self._seen:
            self.duplicates += 1
        else:
            self._seen.add(key)
            self.classes.append(class_id)
            self.boxes.extend(box)
            self.lines.append(line)
            self.polygons.append(np.zeros((0, 2)) if polygon is None else polygon)

    def ignore(self, class_id: int, box: Sequence[float]) -> None:
        """Add an ignored region."""
        self.ignored.classes.append(class_id)
        self.ignored.boxes.extend(box)

    def whole(self) -> ParsedLabels:
        """Itself, after the last row."""
        if self.classes:
            self.remarks += [(line, f"{what}; the object is left out") for line, what in self.left_out]
        else:
            self.problems += self.left_out
        self.polygons = self.polygons if any(map(len, self.polygons)) else []
        return self


def parse_labels(raw: bytes, nc: int, classes: Sequence[int] = (), keypoints: int = 0) -> ParsedLabels:
    """Read a label file; a byte-order mark, Windows or old Mac line ends and blank lines are accepted.

    Args:
        raw: its bytes.
        nc: number of classes, the ignored ones included.
        classes: what the first numbers of a file stand for, as in `Regions` those that are ignored or left out; ()
            where every number is its class.
        keypoints: how many numbers follow the box in a row of a pose; 0 where there are no such rows.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw[3:]
    return (None if classes else _parse_plain(raw, nc)) or parse_rows(raw, nc, classes, keypoints)


def _parse_plain(raw: bytes, nc: int) -> ParsedLabels | None:
    """The fast path; None where anything is unusual."""
    rows = [line.split() for line in raw.splitlines()]
    if b"_" in raw or any(len(row) != 5 for row in rows):  # Python's numbers may have underscores, labels may not
        return None
    if not rows:
        return ParsedLabels()
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
    return ParsedLabels(classes, boxes, lines=[*range(1, len(rows) + 1)])


def parse_rows(raw: bytes, nc: int, classes: Sequence[int] = (), keypoints: int = 0) -> ParsedLabels:
    """Row by row: as `parse_labels`, without a byte-order mark."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ParsedLabels(problems=[(None, UTF_16)])
    if is_lfs_pointer(raw):
        return ParsedLabels(problems=[(None, LFS_POINTER)])
    labels = ParsedLabels()
    for number, line in enumerate(raw.splitlines(), 1):
        tokens = line.split()
        if not tokens:
            continue
        if keypoints and len(tokens) == 5 + keypoints:
            tokens = tokens[:5]
        row = _read_row(tokens, keypoints)
        if isinstance(row, str):
            labels.problems.append((number, row))
        elif row[0] >= nc:
            labels.unknown.append((number, f"{row[0]:.0f}"))
        else:
            class_id = classes[int(row[0])] if 0 <= row[0] < len(classes) else int(row[0])
            points = np.array(row[1:] if len(row) > 5 else ()).reshape(-1, 2)
            box = polygon_box(points) if len(points) else row[1:]
            if min(row[1:]) < 0 or max(row[1:]) > 1:
                points, box = points.clip(0, 1), _cut(box)
                beyond = f"{max(max(row[1:]) - 1, -min(row[1:])):.2g} beyond the image"
                if min(box[2:]) < _NO_AREA:
                    nothing = f"{beyond}: nothing of it is inside"
                    if class_id < 0:
                        labels.remarks.append((number, f"{nothing}; the ignored region is left out"))
                    else:
                        labels.left_out.append((number, nothing))
                    continue
                labels.notes.append((number, f"{beyond}: cut to it"))
            labels.add(number, (class_id, *row[1:]), class_id, box, points)
    return labels.whole()


def _cut(box: Sequence[float]) -> list[float]:
    """The part of a box that lies in the image, as centre and size; a size of 0 where there is none."""
    x, y, width, height = box
    return clipped_fractions(x - width / 2, y - height / 2, x + width / 2, y + height / 2, (1, 1)) or [0.0] * 4


def polygon_box(points: NDArray[np.float64]) -> list[float]:
    """Centre and size of the box around a polygon (k, 2)."""
    low, high = points.min(0), points.max(0)
    return [*((low + high) / 2).tolist(), *(high - low).tolist()]


def _read_row(tokens: list[bytes], keypoints: int) -> tuple[float, ...] | str:
    """The numbers of a row, or what is wrong with it."""
    count = len(tokens)
    if keypoints and count != 5:
        return f"{count} fields, expected 5 (class x y w h), or {5 + keypoints} with the keypoints of kpt_shape"
    if count > 5 and (points := _keypoints(tokens)):
        return (
            f"{count} fields, as a pose has them (class x y w h, then keypoints). Write `kpt_shape: [{points}, 3]` "
            "into the data YAML to train on its box"
        )
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
        if place > 0 and value < (-MOST_BEYOND if count > 5 or place < 3 else 0):
            return f"{name} is {_shown(token)}, expected no negative value"
        if place > 0 and value > 1 + MOST_BEYOND:
            return f"{name} is {_shown(token)}, expected at most 1 (a fraction of the image's width or height)"
        row.append(value)
    return tuple(row)


def _shown(token: bytes) -> str:
    return one_line(token.decode("utf-8", "backslashreplace"), _LONGEST_TOKEN)


def _keypoints(tokens: list[bytes]) -> int:
    """How many keypoints of x, y and visibility (0, 1 or 2) a row has; 0 where it may be a polygon.

    Polygons have an even number of coordinates, and hardly three of them, each three apart, on the image's borders.
    """
    count, rest = divmod(len(tokens) - 5, 3)
    try:
        flags = set(map(float, tokens[7::3]))
    except ValueError:
        return 0
    if rest or not flags <= {0, 1, 2}:
        return 0
    return count if len(tokens) % 2 == 0 or count > 2 or 2 in flags else 0


def _field_name(place: int, count: int) -> str:
    """What the number at `place` of a row of `count` fields is."""
    return _BOX_FIELDS[place - 1] if count == 5 else f"{'xy'[(place - 1) % 2]}{(place + 1) // 2}"


def clipped_fractions(left: float, top: float, right: float, bottom: float, size_hw: Size) -> list[float] | None:
    """Centre and size as fractions of the image, after cutting the box to it; None where nothing is left."""
    height, width = size_hw
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if right <= left or bottom <= top:
        return None
    return [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]


def of_other_size(stated_hw: Size, size_hw: Size, reach_hw: NDArray[np.float64], is_turned: bool) -> tuple[bool, str]:
    """Whether labels that state another size than their image has are about it as it is, and what to say of them.

    Their boxes reach as far as `reach_hw`; `is_turned` where the image's EXIF orientation swaps height and width.
    """
    stated, found = (f"{width} x {height}" for height, width in (stated_hw, size_hw))
    what = f"the annotations are made for {stated} pixels, but the image has {found}"
    if np.abs(np.subtract(stated_hw, size_hw)).max() <= 1:
        return True, f"{what}, which is off by one; its boxes are used as they are"
    if stated_hw != size_hw[::-1]:
        return False, what
    fits, fits_stated = (bool((reach_hw <= np.add(size, 1)).all()) for size in (size_hw, stated_hw))
    is_usable = fits and not (is_turned and fits_stated)
    what += " when it is turned as its EXIF orientation says" if is_turned else ": width and height are swapped"
    return is_usable, f"{what}; its boxes fit the image as it is shown, and are used" if is_usable else what
