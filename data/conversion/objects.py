"""What the formats have in common: an image with its objects, in pixels, and all else that its file says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from tessera.data.conversion.numbers import exact, pixel_text
from tessera.data.source.annotations.segmentation import numbers
from tessera.utils.text import strict_json

ANY_NAME = "-1"  # the class of a region that is about every class: label files have that number
_OWN_KEYS = frozenset({"id", "image_id", "category_id", "category", "bbox", "segmentation", "iscrowd", "area"})

Size = tuple[int, int]
Box = tuple[Fraction, Fraction, Fraction, Fraction]


@dataclass(frozen=True)
class Labelled:
    """An object or an ignored region.

    Attributes:
        name: its class in the labels; ANY_NAME of a region that is about every class.
        box: left, top, width, height in pixels, as they are written: nothing is cut to the image.
        ignored: a crowd, a difficult object, or a region of ANY_NAME.
        parts: polygons, x and y by turns in pixels.
        more: what else its file says of it, such as a pose, or the "segmentation" where it is not just `parts`.
    """

    name: str
    box: Box
    ignored: bool = False
    parts: tuple[tuple[Fraction, ...], ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def area(self) -> Fraction:
        """Of its polygons, else of its box, in square pixels."""
        return sum(map(_area, self.parts), Fraction()) if self.parts else self.box[2] * self.box[3]

    def fields(self) -> dict[str, str]:
        """A COCO annotation without its ids: key → JSON."""
        more = dict(self.more)
        mask = more.pop("segmentation", None)
        parts = ", ".join(f"[{_listed(part)}]" for part in self.parts)
        return {
            "bbox": f"[{_listed(self.box)}]",
            "segmentation": f"[{parts}]" if mask is None else strict_json(mask),
            "area": strict_json(more.pop("area", float(self.area))),
            "iscrowd": str(int(self.ignored)),
            **{key: strict_json(value) for key, value in more.items()},
            "category": strict_json(self.name),
        }


@dataclass(frozen=True)
class LabelledImage:
    """An image of a split.

    Attributes:
        path: its file, absolute.
        place: where it lies below the split's folder, such as "street/a.jpg".
        size_hw: height and width in pixels, after EXIF orientation.
        has_labels: False where it has no label file, which makes it background.
        objects: in the order of the file.
        more: what a COCO file says of it, with its id.
    """

    path: str
    place: str
    size_hw: Size
    has_labels: bool
    objects: tuple[Labelled, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


def of_record(record: Mapping[str, Any], name: str) -> Labelled | None:
    """The object of a COCO annotation; None of one without a box, which only regions may lack."""
    if len(numbers(plain(record.get("bbox"))) or ()) != 4:
        return None
    left, top, width, height = map(exact, record["bbox"])
    found, more = record.get("segmentation"), {key: value for key, value in record.items() if key not in _OWN_KEYS}
    polygons = [part for part in found if _is_polygon(part)] if isinstance(found, list) else []
    parts = tuple(tuple(map(exact, part)) for part in polygons)
    if found is not None and polygons != found:
        more["segmentation"] = found
    ignored = bool(record.get("iscrowd")) or name == ANY_NAME
    labelled = Labelled(name, (left, top, width, height), ignored, parts, {k: plain(v) for k, v in more.items()})
    area = plain(record.get("area"))
    if isinstance(area, (int, float)) and float(area) != float(labelled.area):
        return Labelled(name, labelled.box, ignored, parts, {**labelled.more, "area": area})
    return labelled


def record_text(fields: Mapping[str, str]) -> str:
    """A JSON object of `fields`, whose values are JSON."""
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in fields.items()) + "}"


def plain(value: Any) -> Any:
    """JSON as Python's own reader gives it: numbers that were kept with all their digits become floats."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float)) or value is None else float(value)


def bounds(parts: Iterable[Sequence[Fraction]]) -> Box:
    """The box around polygons."""
    xs, ys = ([number for part in parts for number in part[axis::2]] for axis in (0, 1))
    return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


def _is_polygon(part: Any) -> bool:
    """Whether the reader of COCO files takes it."""
    count = len(numbers(plain(part)) or ())
    return count >= 6 and count % 2 == 0


def _area(part: Sequence[Fraction]) -> Fraction:
    """Of a polygon, by the shoelace formula."""
    points = list(zip(part[::2], part[1::2], strict=True))
    return abs(sum((x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in pairwise([*points, points[0]])), Fraction())) / 2


def _listed(values: Iterable[Fraction]) -> str:
    return ", ".join(map(pixel_text, values))
