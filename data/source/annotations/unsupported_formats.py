"""Annotations in formats that are not read: which tool's they are, and what to do."""

# Paths are strings, as in data/source/split_files.py.
# ruff: noqa: PTH120, PTH122
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tessera.utils.files import open_plain, suffix_of

_IMAGES, _TRIED = 20, 100  # images that files are looked for beside, and such files
_LONGEST, _HEAD = 1 << 24, 1 << 12  # bytes of a JSON file, and of another
_EXPORT = "Export COCO, YOLO or Pascal VOC from it."
# What a JSON object, or each object of a list, has → whose it is and the remedy. The first that fits counts.
_KEYS: dict[tuple[str, ...], str] = {
    ("images", "annotations", "categories"): "COCO. Write `train: {path}` to read it.",
    ("shapes", "imagePath"): "labelme's JSON of one image. Convert the folder, as with labelme2coco.",
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
# The same of the columns of a CSV.
_OPEN_IMAGES = "Open Images' CSV. Convert it to COCO or YOLO, such as with FiftyOne or Datumaro."
_TABLES: dict[tuple[str, ...], str] = {
    ("ImageID", "LabelName", "XMin", "XMax"): _OPEN_IMAGES,
    ("filename", "class", "xmin", "ymin", "xmax", "ymax"): f"TensorFlow's CSV. {_EXPORT}",
    ("filename", "region_shape_attributes"): f"the CSV of the VGG Image Annotator. {_EXPORT}",
}
_CVAT = f"CVAT's own XML. {_EXPORT}"


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


def tool_of(path: str) -> str:
    """Whose annotations a JSON, CSV or XML file holds; "" where that is not known."""
    suffix = suffix_of(path)
    try:
        with open_plain(path) as file:
            if suffix == ".json":
                return other_tool(json.loads(file.read(_LONGEST)))
            head = file.read(_HEAD).decode(errors="replace")
    except (OSError, ValueError, RecursionError):
        return ""
    if suffix == ".xml":
        return _CVAT if "<annotations>" in head else ""
    columns = {*head.partition("\n")[0].strip().split(",")}
    return next((what for names, what in _TABLES.items() if columns >= {*names}), "")


def beside_images(images: Iterable[str], root: str) -> str:
    """What the annotations beside images are: the first file that is known, and whose; "" where there is none."""
    for path in islice(_beside([*islice(images, _IMAGES)]), _TRIED):
        if what := tool_of(path):
            return f"{path} is not read: it is {what.replace('{path}', os.path.relpath(path, root))}"
    return ""


def _beside(images: list[str]) -> Iterator[str]:
    """Where tools write annotations: a file for each image, or one for all in the folder of these, above or beside."""
    above: dict[str, str] = {}
    for image in images:
        folder, name = os.path.split(image)
        above[folder] = os.path.dirname(folder)
        yield from (f"{os.path.splitext(image)[0]}.json", f"{image}.json", f"{above[folder]}/ann/{name}.json")
    beside = [f"{folder}/{name}" for folder in above.values() for name in ("annotations", "labels")]
    for folder in dict.fromkeys([*above, *above.values(), *beside]):
        yield from sorted(str(path) for path in Path(folder).glob("*.*") if path.suffix in (".csv", ".json", ".xml"))
