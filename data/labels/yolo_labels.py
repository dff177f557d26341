"""YOLO label files, parsed to ParsedLabels, which the VOC and COCO readers also fill.

A row of class -1 is an ignored region, neither object nor background. Coordinates that exceed the image by a rounding
error are clipped.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.errors import LFS_POINTER, UTF_16, is_lfs_pointer
from tessera.utils.text import one_line

_BOX_FIELDS = ("x", "y", "w", "h")
_MAX_CLASS = 2**31 - 1
ALL_CLASSES = -1  # class of an ignored region that applies to all classes
MAX_OVERSHOOT = 0.01  # fraction of a side by which a coordinate may exceed the image and is clipped
_LONGEST_TOKEN = 25  # characters in a message
_DECIMAL_COMMA = re.compile(rb"-?\d*,\d+")
_NO_AREA = 1e-9  # fraction of a side that rounding may leave of a box outside the image

_NO_POLYGON = np.zeros((0, 2))

Size = tuple[int, int]
Corners = tuple[float, float, float, float]


class IgnoredRegions(NamedTuple):
    """Ignored regions, neither object nor background: crowds, difficult objects, ignored classes, class -1.

    Attributes:
        classes: class of each region; ALL_CLASSES; -2 - k for the k-th ignored class, which applies to all, too.
            Excluded classes have the numbers below these; the scan drops them.
    """

    classes: list[int]
    boxes: list[float]  # as in ParsedLabels


@dataclass
class ParsedLabels:
    """Objects of one image without duplicates, with messages on unusable rows."""

    classes: list[int] = field(default_factory=list)
    boxes: list[float] = field(default_factory=list)  # centre x and y, width, height of each object; fractions
    # (k, 2) xy fractions of each object, k = 0 for a box; [] if all are boxes.
    polygons: list[NDArray[np.float64]] = field(default_factory=list)
    duplicates: int = 0  # skipped rows that equal an earlier one
    problems: list[tuple[int | None, str]] = field(default_factory=list)  # (line or None = file, message): unusable
    unknown: list[tuple[int, str]] = field(default_factory=list)  # (line, unnamed class)
    ignored: IgnoredRegions = field(default_factory=lambda: IgnoredRegions([], []))
    remarks: list[tuple[int | None, str]] = field(default_factory=list)  # (line, message): dropped, image usable
    lines: list[int] = field(default_factory=list)  # line of each object
    notes: list[tuple[int, str]] = field(default_factory=list)  # (line, message): clipped boxes
    stated_hw: Size = (0, 0)  # image size that the labels state; (0, 0) if they do not
    unlabelled: int = 0  # removed objects of classes that the image's entry does not label
    # Become remarks; problems if no object is left, as the image would seem to be background.
    rejected_rows: list[tuple[int, str]] = field(default_factory=list)
    _seen: set[tuple[float | str, ...]] = field(default_factory=set, compare=False)

    def add(
        self,
        line: int,
        key: tuple[float | str, ...],
        class_id: int,
        box: Sequence[float],
        polygon: NDArray[np.float64] | None = None,
    ) -> None:
        """Add an object unless its `key` is a duplicate; classes below 0 become ignored regions."""
        if class_id < 0:
            self.ignore(class_id, box)
        elif key in self._seen:
            self.duplicates += 1
        else:
            self._seen.add(key)
            self.classes.append(class_id)
            self.boxes.extend(box)
            self.lines.append(line)
            self.polygons.append(_NO_POLYGON if polygon is None else polygon)

    def ignore(self, class_id: int, box: Sequence[float]) -> None:
        """Add an ignored region."""
        self.ignored.classes.append(class_id)
        self.ignored.boxes.extend(box)

    def keep_only(self, classes: Collection[int]) -> None:
        """Remove the objects of other classes, and count them; after `finish`."""
        keep = [own in classes for own in self.classes]
        self.boxes = [x for at, kept in enumerate(keep) if kept for x in self.boxes[4 * at : 4 * at + 4]]
        self.classes, self.lines = list(compress(self.classes, keep)), list(compress(self.lines, keep))
        self.polygons = list(compress(self.polygons, keep))
        self.unlabelled = len(keep) - sum(keep)
        if self.unlabelled and classes and not self.classes:
            rejected = [line for line, _ in self.rejected_rows]
            self.remarks = [(line, what) for line, what in self.remarks if line not in rejected]
            self.problems += self.rejected_rows

    def finish(self) -> ParsedLabels:
        """Sort the messages after the last row and return the labels."""
        if self.classes:
            self.remarks += [(line, f"{what}; object skipped") for line, what in self.rejected_rows]
        else:
            self.problems += self.rejected_rows
        self.polygons = self.polygons if any(map(len, self.polygons)) else []
        return self


def parse_labels(raw: bytes, nc: int, classes: Sequence[int] = (), keypoints: int = 0) -> ParsedLabels:
    """Parse a label file; a byte-order mark, Windows or old Mac line ends and blank lines are accepted.

    Args:
        raw: content of the file.
        nc: number of classes, ignored ones included.
        classes: class of each class number in the file, below 0 if ignored or excluded; () if all numbers are classes.
        keypoints: count of numbers after the box in a pose row; 0 without keypoints.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw[3:]
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
            points = np.array(row[1:]).reshape(-1, 2) if len(row) > 5 else _NO_POLYGON
            box = polygon_box(points) if len(points) else row[1:]
            if min(row[1:]) < 0 or max(row[1:]) > 1:
                x, y, width, height = box
                corners = x - width / 2, y - height / 2, x + width / 2, y + height / 2
                points, box = points.clip(0, 1), clipped_fractions(*corners, (1, 1)) or [0.0] * 4
                beyond = f"{max(max(row[1:]) - 1, -min(row[1:])):.2g} beyond the image"
                if min(box[2:]) < _NO_AREA:
                    nothing = f"{beyond}: nothing of it is inside"
                    if class_id < 0:
                        labels.remarks.append((number, f"{nothing}; ignored region skipped"))
                    else:
                        labels.rejected_rows.append((number, nothing))
                    continue
                labels.notes.append((number, f"{beyond}: clipped"))
            labels.add(number, (class_id, *row[1:]), class_id, box, points)
    return labels.finish()


def polygon_box(points: NDArray[np.float64]) -> list[float]:
    """Return centre and size of the box around a polygon (k, 2)."""
    low, high = points.min(0), points.max(0)
    return [*((low + high) / 2).tolist(), *(high - low).tolist()]


def _read_row(tokens: list[bytes], keypoints: int) -> tuple[float, ...] | str:
    """Return the numbers of a row, or a message."""
    count = len(tokens)
    if any(b"," in token or b";" in token for token in tokens):
        return _wrong_separator(tokens)
    if keypoints and count != 5:
        return f"{count} fields, expected 5 (class x y w h), or {5 + keypoints} with the keypoints of kpt_shape"
    if count > 5 and (points := _keypoints(tokens)):
        return (
            f"{count} fields, as a pose has them (class x y w h, then keypoints). Write `kpt_shape: [{points}, 3]` "
            "into the data YAML to train on its box"
        )
    if count == 6:
        return (
            "6 fields, expected 5 (class x y w h): the sixth may be a confidence of --save-conf. Remove it, or write "
            "labels for training with --auto-label"
        )
    if count != 5 and (count < 7 or count % 2 == 0):
        noun = "field" if count == 1 else "fields"
        return (
            f"{count} {noun}, expected 5 (class x y w h) or a class and at least 3 points (class x1 y1 x2 y2 x3 y3 …)"
        )
    with suppress(ValueError):
        numbers = tuple(map(float, tokens))
        is_class = numbers[0].is_integer() and ALL_CLASSES <= numbers[0] <= _MAX_CLASS
        is_inside = min(numbers[1:]) >= 0 and max(numbers[1:]) <= 1 and math.isfinite(sum(numbers))
        if is_class and is_inside and b"_" not in b"".join(tokens):  # Python parses underscores in numbers
            return numbers
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
        if place == 0 and (value != int(value) or not ALL_CLASSES <= value <= _MAX_CLASS):
            return f"class is {_shown(token)}, expected an integer from 0 on, or -1 for a region to ignore"
        if place > 0 and value < (-MAX_OVERSHOOT if count > 5 or place < 3 else 0):
            return f"{name} is {_shown(token)}, expected no negative value"
        if place > 0 and value > 1 + MAX_OVERSHOOT:
            return f"{name} is {_shown(token)}, expected at most 1 (a fraction of the image's width or height)"
        row.append(value)
    return tuple(row)


def _wrong_separator(tokens: list[bytes]) -> str:
    if len(tokens) > 1 and all(_DECIMAL_COMMA.fullmatch(token) for token in tokens[1:]):
        return f"'{_shown(tokens[1])}' has a decimal comma, expected a point"
    separators = "semicolons" if b";" in b"".join(tokens) else "commas"
    return f"the fields are separated by {separators}, expected spaces"


def _shown(token: bytes) -> str:
    return one_line(token.decode("utf-8", "backslashreplace"), _LONGEST_TOKEN)


def _keypoints(tokens: list[bytes]) -> int:
    """Return the number of keypoints (x, y, visibility 0, 1 or 2) of a row; 0 if it may be a polygon.

    Polygons have an even number of coordinates, and hardly ever 0 or 1 at every third of them.
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
    return _BOX_FIELDS[place - 1] if count == 5 else f"{'xy'[(place - 1) % 2]}{(place + 1) // 2}"


def clipped_box(corners: Corners, size_hw: Size, origin: int = 0) -> list[float] | str:
    """Clip a box to the image as `clipped_fractions`, or return a message; the first pixel has index `origin`."""
    left, top, right, bottom = corners
    outside = f"the box {[*corners]} lies outside the image of {size_hw[1]} x {size_hw[0]} pixels"
    return clipped_fractions(left - origin, top - origin, right, bottom, size_hw) or outside


def clipped_fractions(left: float, top: float, right: float, bottom: float, size_hw: Size) -> list[float] | None:
    """Clip a box to the image; return centre and size as fractions, or None if nothing is left."""
    height, width = size_hw
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if right <= left or bottom <= top:
        return None
    return [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]


def check_stated_size(
    stated_hw: Size, size_hw: Size, reach_hw: NDArray[np.float64], is_turned: bool
) -> tuple[bool, str]:
    """Return whether labels that state another image size are usable, and a message.

    `reach_hw` is the largest extent of their boxes. `is_turned` means that EXIF orientation swaps height and width.
    """
    stated, found = (f"{width} x {height}" for height, width in (stated_hw, size_hw))
    what = f"the annotations are made for {stated} pixels, but the image has {found}"
    if np.abs(np.subtract(stated_hw, size_hw)).max() <= 1:
        return True, f"{what}, which is off by one; its boxes are used as they are"
    if stated_hw != size_hw[::-1]:
        return False, what
    fits, fits_stated = (bool((reach_hw <= np.add(size, 1)).all()) for size in (size_hw, stated_hw))
    is_usable = fits and not (is_turned and fits_stated)
    what += " after applying its EXIF orientation" if is_turned else ": width and height are swapped"
    return is_usable, f"{what}; its boxes fit the displayed image and are used" if is_usable else what
