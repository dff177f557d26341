"""Annotations in formats that are not read: which tool's they are, and what to do."""

# Paths are strings, as in data/source/listing.py.
# ruff: noqa: PTH122
from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice
from typing import Any

from tessera.utils.files import open_plain

_TRIED = 20  # images that a JSON file is looked for beside
_LONGEST = 1 << 24  # bytes of it
_EXPORT = "Export COCO, YOLO or Pascal VOC from it."
# What a JSON object, or each object of a list, has → whose it is and the remedy. The first that fits counts.
_KEYS: dict[tuple[str, ...], str] = {
    (
        "shapes",
        "imagePath",
    ): "labelme's JSON of one image. Convert the folder, as with labelme2coco.",
    ("_via_img_metadata",): f"a project of the VGG Image Annotator. {_EXPORT}",
    ("filename", "regions"): f"annotations of the VGG Image Annotator. {_EXPORT}",
    ("data", "annotations"): f"Label Studio's JSON. {_EXPORT}",
    ("image", "annotation_id"): f"Label Studio's short JSON. {_EXPORT}",
    ("image", "annotations"): f"CreateML's JSON. {_EXPORT}",
    ("image_id", "category_id", "score"): "a file of results, expected the annotations that these belong to.",
    ("classes", "labels"): "FiftyOne's own JSON. Export it as fiftyone.types.COCODetectionDataset or YOLOv5Dataset.",
    ("samples",): "FiftyOne's own JSON. Export it as fiftyone.types.COCODetectionDataset or YOLOv5Dataset.",
    ("categories", "items"): "Datumaro's own JSON. Convert it with `datum convert -f coco` or `-f yolo`.",
    ("objects", "size", "tags"): f"Supervisely's JSON of one image. {_EXPORT}",
    ("name", "labels"): f"Scalabel's or BDD100K's JSON. {_EXPORT}",
}
_OPEN_IMAGES = {"ImageID", "LabelName", "XMin", "XMax"}


def other_tool(content: Any) -> str:
    """Whose annotations a JSON holds; "" where that is not known."""
    if isinstance(content, dict) and content and all(isinstance(value, dict) for value in content.values()):
        own = other_tool([*content.values()]) if not _named(content) else ""  # VIA: image → its regions
        if own:
            return own
    first = content[0] if isinstance(content, list) and content else content
    return _named(first) if isinstance(first, dict) else ""


def _named(record: dict[str, Any]) -> str:
    return next((what for keys, what in _KEYS.items() if record.keys() >= {*keys}), "")


def beside_images(images: Iterable[str]) -> str:
    """What the JSON beside images is: the first one, and whose; "" where there is none that is known."""
    for image in islice(images, _TRIED):
        path = os.path.splitext(image)[0] + ".json"
        try:
            with open_plain(path) as file:
                what = other_tool(json.loads(file.read(_LONGEST)))
        except (OSError, ValueError, RecursionError):
            continue
        if what:
            return f"{path} is not read: it is {what}"
    return ""


def table_of(path: str) -> str:
    """Whose table a CSV is; "" where that is not known."""
    try:
        with open_plain(path) as file:
            columns = file.readline(_LONGEST).decode(errors="replace").strip().split(",")
    except OSError:
        return ""
    if not {*columns} >= _OPEN_IMAGES:
        return ""
    return "Open Images' CSV, which is not read. Convert it to COCO or YOLO, such as with FiftyOne or Datumaro."
