"""Objects and ignored regions of one image, parsed from COCO annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.annotations.yolo_labels import Corners, ParsedLabels, Size, clipped_box
from tessera.utils.text import shown


def parse_coco(
    annotations: Sequence[tuple[int, dict[str, Any]]],
    size_hw: Size,
    categories: Mapping[int, str],
    class_ids: Mapping[str, int],
) -> ParsedLabels:
    """Parse the annotations of one image; the "line" of an object is its place in `annotations`.

    Boxes (x, y, width, height in pixels) are clipped to the image. A missing or all-zero box is replaced by the box
    around the polygon. Crowds, and objects of classes below 0 in `class_ids`, become ignored regions. The key "ignore"
    has no effect, as in pycocotools. The parts of a polygon are concatenated. Run-length masks are not read.
    """
    labels = ParsedLabels()
    for number, record in annotations:
        name = category_of(record, categories)
        corners = _corners(record)
        box = corners if isinstance(corners, str) else clipped_box(corners, size_hw)
        if is_crowd(record) or (name is not None and class_ids.get(name, 0) < 0):
            if isinstance(box, str):
                labels.remarks.append((number, f"{box}; ignored region skipped"))
            elif name is not None and name in class_ids:
                labels.ignore(class_ids[name], box)
        elif isinstance(box, str):
            labels.left_out.append((number, box))
        elif name is None or name not in class_ids:
            unnamed = f"category {shown(to_integer(record.get('category_id')))}"
            labels.unknown.append((number, unnamed if name is None else shown(name)))
        else:
            height, width = size_hw
            polygon = np.clip(polygon_of(record.get("segmentation")) / (width, height), 0.0, 1.0)
            labels.add(number, (class_ids[name], *corners, *polygon.ravel().tolist()), class_ids[name], box, polygon)
    return labels.finish()


def numbers(value: Any) -> list[float] | None:
    """Return a list of finite numbers; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        return None
    try:
        numbers = [float(item) for item in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def polygon_of(segmentation: Any) -> NDArray[np.float64]:
    """Return the points (k, 2) of a polygon in pixels, part after part; none for a mask or anything else."""
    parts = [numbers(part) for part in segmentation] if isinstance(segmentation, list) else []
    usable = [part for part in parts if part and len(part) >= 6 and len(part) % 2 == 0]
    return np.concatenate([np.zeros(0), *usable]).reshape(-1, 2)


def category_of(record: Mapping[str, Any], categories: Mapping[int, str]) -> str | None:
    """Return the name of an annotation's category; None if the file has no such category."""
    category = to_integer(record.get("category_id"))
    return categories.get(category) if isinstance(category, int) else None


def is_crowd(record: Mapping[str, Any]) -> bool:
    """Return whether an annotation is a crowd; text such as "0" or "false" counts by its meaning."""
    value = record.get("iscrowd")
    return value.lower() not in ("", "0", "no", "false", "none") if isinstance(value, str) else bool(value)


def _corners(record: Mapping[str, Any]) -> Corners | str:
    """Return the corners of the box in pixels; a message if there is neither a box nor a polygon."""
    found = record.get("bbox")
    if found in (None, [], [0, 0, 0, 0]) and len(points := polygon_of(record.get("segmentation"))):
        return (
            float(points[:, 0].min()),
            float(points[:, 1].min()),
            float(points[:, 0].max()),
            float(points[:, 1].max()),
        )
    box = numbers(found)
    if box is None or len(box) != 4 or box[2] <= 0 or box[3] <= 0:
        what = f"bbox is {as_json(found)}" if "bbox" in record else "there is no bbox"
        return f"{what}, expected x, y, width, height in pixels, the last two above 0"
    return box[0], box[1], box[0] + box[2], box[1] + box[3]


def to_integer(value: Any) -> Any:
    """Return text of digits (12 or 12.0) and floats without a fraction as int; anything else unchanged."""
    if isinstance(value, str) and value.isascii() and len(value) < 20:
        text = value.removesuffix(".0")
        return int(text) if text.removeprefix("-").isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_json(value: Any) -> str:
    """Return a value of a JSON file as messages show it."""
    return "null" if value is None else shown(value, 60)
