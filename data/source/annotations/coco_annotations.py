"""Objects of an image in a COCO file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.data.source.annotations.segmentation import Corners, mask_box, numbers, polygon_parts
from tessera.data.source.annotations.yolo_labels import ParsedLabels, Size, clipped_fractions
from tessera.utils.text import shown


def parse_coco(
    annotations: Sequence[tuple[int, dict[str, Any]]],
    size_hw: Size,
    categories: Mapping[int, str],
    class_ids: Mapping[str, int],
) -> ParsedLabels:
    """Objects of one image of a COCO file; "line" is the place in `annotations`.

    Boxes (x, y, width, height in pixels) are cut to the image; one that is missing, or of zeros, is that of the
    segmentation. Crowds, and objects of a class that is ignored, become regions; the key "ignore" has no effect, as in
    pycocotools, which overwrites it. Polygons of several parts become one, part after part; run-length masks leave the
    box alone.

    Args:
        annotations: (number, record) of the image.
        size_hw: height and width of the image in pixels.
        categories: category id → name.
        class_ids: name → class, below 0 that of an ignored one.
    """
    labels = ParsedLabels()
    for number, record in annotations:
        name = category_of(record, categories)
        corners = corners_of(record, size_hw)
        box = corners if isinstance(corners, str) else _clipped_box(corners, size_hw)
        if is_crowd(record) or (name is not None and class_ids.get(name, 0) < 0):
            if isinstance(box, str):
                labels.remarks.append((number, f"{box}; the ignored region is left out"))
            elif name is not None and name in class_ids:
                labels.ignore(class_ids[name], box)
        elif isinstance(box, str):
            labels.left_out.append((number, box))
        elif name is None or name not in class_ids:
            unnamed = f"category {shown(whole(record.get('category_id')))}"
            labels.unknown.append((number, unnamed if name is None else shown(name)))
        else:
            parts = polygon_parts(record.get("segmentation"))
            height, width = size_hw
            polygon = np.clip(np.concatenate([np.zeros((0, 2)), *parts]) / (width, height), 0.0, 1.0)
            labels.add(number, (class_ids[name], *corners, *polygon.ravel().tolist()), class_ids[name], box, polygon)
    return labels.whole()


def category_of(record: Mapping[str, Any], categories: Mapping[int, str]) -> str | None:
    """Name of the category of an annotation; None where the file has no such category."""
    category = whole(record.get("category_id"))
    return categories.get(category) if isinstance(category, int) else None


def is_crowd(record: Mapping[str, Any]) -> bool:
    """Whether an annotation is a crowd; text such as "0" or "false" stands for what it says."""
    value = record.get("iscrowd")
    return value.lower() not in ("", "0", "no", "false", "none") if isinstance(value, str) else bool(value)


def corners_of(record: Mapping[str, Any], size_hw: Size) -> Corners | str:
    """Corners in pixels of the bbox, or of the segmentation where there is none but zeros; or what is wrong with it."""
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


def whole(value: Any) -> Any:
    """The integer that a text of digits (12 or 12.0) or a number without fraction is; anything else as it is."""
    if isinstance(value, str) and value.isascii() and len(value) < 20:
        text = value.removesuffix(".0")
        return int(text) if text.removeprefix("-").isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_json(value: Any) -> str:
    """Return a value of a JSON file as messages show it."""
    return "null" if value is None else shown(value, 60)


def _clipped_box(corners: Corners, size_hw: Size) -> list[float] | str:
    """Centre and size as fractions of the image, or what is wrong with the box."""
    outside = f"the box {[*corners]} lies outside the image of {size_hw[1]} x {size_hw[0]} pixels"
    return clipped_fractions(*corners, size_hw) or outside
