"""Objects and ignored regions of one image, parsed from COCO annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.data.source.annotations.segmentation import mask_box, numbers, polygon_parts
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
    around the segmentation. Crowds, and objects of classes below 0 in `class_ids`, become ignored regions. The key
    "ignore" has no effect, as in pycocotools. The parts of a polygon are concatenated.
    """
    labels = ParsedLabels()
    for number, record in annotations:
        name = category_of(record, categories)
        corners = _corners(record, size_hw)
        box = corners if isinstance(corners, str) else clipped_box(corners, size_hw)
        if is_crowd(record) or (name is not None and class_ids.get(name, 0) < 0):
            if isinstance(box, str):
                labels.remarks.append((number, f"{box}; ignored region skipped"))
            elif name is not None and name in class_ids:
                labels.ignore(class_ids[name], box)
        elif isinstance(box, str):
            labels.rejected_rows.append((number, box))
        elif name is None or name not in class_ids:
            unnamed = f"category {shown(to_integer(record.get('category_id')))}"
            labels.unknown.append((number, unnamed if name is None else shown(name)))
        else:
            height, width = size_hw
            parts = polygon_parts(record.get("segmentation"))
            polygon = np.clip(np.concatenate([np.zeros((0, 2)), *parts]) / (width, height), 0.0, 1.0)
            labels.add(number, (class_ids[name], *corners, *polygon.ravel().tolist()), class_ids[name], box, polygon)
    return labels.finish()


def category_of(record: Mapping[str, Any], categories: Mapping[int, str]) -> str | None:
    """Return the name of an annotation's category; None if the file has no such category."""
    category = to_integer(record.get("category_id"))
    return categories.get(category) if isinstance(category, int) else None


def is_crowd(record: Mapping[str, Any]) -> bool:
    """Return whether an annotation is a crowd; text such as "0" or "false" counts by its meaning."""
    value = record.get("iscrowd")
    return value.lower() not in ("", "0", "no", "false", "none") if isinstance(value, str) else bool(value)


def _corners(record: Mapping[str, Any], size_hw: Size) -> Corners | str:
    """Return the corners in pixels of the box, else of the segmentation, or a message if neither is valid."""
    found, segmentation = record.get("bbox"), record.get("segmentation")
    what = f"bbox is {as_json(found)}" if "bbox" in record else "there is no bbox"
    if found in (None, [], [0, 0, 0, 0]) and segmentation:
        height, width = size_hw
        return mask_box(segmentation, size_hw) or (
            f"{what}, and the segmentation is {shown(segmentation, 60)}, expected polygons ([[x1, y1, x2, y2, …]]) or "
            f"run lengths of the size [{height}, {width}] that cover a pixel of the image"
        )
    box = numbers(found)
    if box is None or len(box) != 4 or box[2] <= 0 or box[3] <= 0:
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
