"""Annotations of other tools, read as they are: Pascal VOC XML and COCO JSON. Nothing is converted on disk."""

from __future__ import annotations

import json
import math
import xml.parsers.expat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.source.labels import ParsedLabels
from utils.errors import UserError

Size = tuple[int, int]


def parse_voc(raw: bytes, size_hw: Size, class_ids: Mapping[str, int]) -> ParsedLabels:
    """Read a Pascal VOC annotation.

    Coordinates are pixels that count from 1, both ends included (VOC 2012 development kit, 3.3): a box covers
    [xmin − 1, xmax]. Objects marked difficult are left out, as VOC's own evaluation does.

    Args:
        raw: bytes of the XML file. One that declares entities is refused.
        size_hw: height and width of the image in pixels.
        class_ids: name → class.
    """
    reader = _VocReader()
    try:
        reader.parser.Parse(raw, True)
    except xml.parsers.expat.ExpatError as error:
        return ParsedLabels(
            [], [], problems=[(error.lineno, f"not valid XML ({xml.parsers.expat.ErrorString(error.code)})")]
        )
    except _Refused as error:
        return ParsedLabels([], [], problems=[(reader.parser.CurrentLineNumber, str(error))])
    if reader.root != "annotation":
        return ParsedLabels([], [], problems=[(1, f"the root is <{reader.root}>, expected <annotation>")])
    height, width = size_hw
    classes: list[int] = []
    boxes: list[float] = []
    problems: list[tuple[int | None, str]] = []
    unknown: list[tuple[int, str]] = []
    seen: set[tuple[Any, ...]] = set()
    duplicates = 0
    stated = tuple(reader.size.get(side, "") for side in ("height", "width"))
    if all(text.isdecimal() and int(text) > 0 for text in stated) and tuple(map(int, stated)) != size_hw:
        found = f"{stated[1]} x {stated[0]}"
        problems.append((None, f"made for an image of {found} pixels, but the image has {width} x {height}"))
    for item in reader.objects:
        if item.fields.get("difficult", "0") == "1":
            continue
        corners = _voc_corners(item.fields)
        if isinstance(corners, str):
            problems.append((item.line, corners))
            continue
        name = item.fields.get("name", "")
        if name not in class_ids:
            unknown.append((item.line, f"'{name}'"))
            continue
        left, top, right, bottom = corners
        box = _clipped_fractions(left - 1, top - 1, right, bottom, size_hw)
        if box is None:
            problems.append((item.line, f"the box {corners} lies outside the image of {width} x {height} pixels"))
        elif (name, *corners) in seen:
            duplicates += 1
        else:
            seen.add((name, *corners))
            classes.append(class_ids[name])
            boxes.extend(box)
    return ParsedLabels(classes, boxes, (), duplicates, problems, unknown)


class _Refused(Exception):
    """The XML contains what no annotation needs."""


@dataclass
class _VocObject:
    line: int
    fields: dict[str, str] = field(default_factory=dict)


class _VocReader:
    """Collects <size> and the <object>s with their lines; parts of objects (<part>) are skipped."""

    def __init__(self) -> None:
        self.root = ""
        self.size: dict[str, str] = {}
        self.objects: list[_VocObject] = []
        self._path: list[str] = []
        self._text: list[str] = []
        self.parser = xml.parsers.expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text.append
        self.parser.EntityDeclHandler = self._refuse

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.root = self.root or name
        self._path.append(name)
        self._text.clear()
        if self._path[1:] == ["object"]:
            self.objects.append(_VocObject(self.parser.CurrentLineNumber))

    def _end(self, name: str) -> None:
        text = "".join(self._text).strip()
        inner = self._path[1:]
        if inner[:1] == ["object"] and (len(inner) == 2 or (inner[1:2] == ["bndbox"] and len(inner) == 3)):
            self.objects[-1].fields[name] = text
        elif inner[:1] == ["size"] and len(inner) == 2:
            self.size[name] = text
        self._path.pop()
        self._text.clear()

    def _refuse(self, *declaration: Any) -> None:
        raise _Refused("it declares entities, which no annotation needs")


def _voc_corners(fields: Mapping[str, str]) -> tuple[float, float, float, float] | str:
    """xmin, ymin, xmax, ymax, or what is wrong with them."""
    corners: list[float] = []
    for key in ("xmin", "ymin", "xmax", "ymax"):
        text = fields.get(key)
        if text is None:
            return f"the object has no <{key}>"
        try:
            value = float(text)
        except ValueError:
            return f"<{key}> is '{text[:24]}', expected a number"
        if not math.isfinite(value):
            return f"<{key}> is {text[:24]}, expected a finite number"
        corners.append(value)
    left, top, right, bottom = corners
    if right < left or bottom < top:
        return f"xmax or ymax is smaller than xmin or ymin ({left:g} {top:g} {right:g} {bottom:g})"
    return left, top, right, bottom


def _clipped_fractions(left: float, top: float, right: float, bottom: float, size_hw: Size) -> list[float] | None:
    """Centre and size as fractions of the image, after cutting the box to it; None where nothing is left."""
    height, width = size_hw
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if right < left or bottom < top:
        return None
    return [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]


@dataclass
class CocoImage:
    """An image of a COCO file: its place, stated size (0, 0 where it states none) and annotations (number, record)."""

    path: str
    size_hw: Size
    annotations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class CocoFile:
    """A COCO detection file.

    Attributes:
        path: the file.
        images: in the file's order.
        categories: category id → name.
    """

    path: Path
    images: list[CocoImage]
    categories: dict[int, str]


def read_coco(path: Path, folders: Sequence[Path]) -> CocoFile:
    """Read a COCO detection file.

    Args:
        path: the JSON.
        folders: where the images may be; the first with one of the first images is taken for all.

    Raises:
        UserError: unreadable, not COCO, or the images are in none of `folders`.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, expected a COCO JSON.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). Export the file anew.") from error
    try:
        categories = {int(item["id"]): str(item["name"]) for item in content["categories"]}
        images = {item["id"]: item for item in content["images"]}
        annotations = list(content.get("annotations", []))
        names = [str(item["file_name"]) for item in images.values()]
        sizes = [(int(item.get("height") or 0), int(item.get("width") or 0)) for item in images.values()]
        owners = [item["image_id"] for item in annotations]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: expected a COCO detection file with images (id, file_name), annotations (image_id, category_id, "
            f"bbox) and categories (id, name); found {type(error).__name__} {error}."
        ) from error
    folder = _image_folder(path, names, folders)
    records = {key: CocoImage(str(folder / name), size) for key, name, size in zip(images, names, sizes, strict=True)}
    for number, (owner, annotation) in enumerate(zip(owners, annotations, strict=True)):
        if not isinstance(owner, (int, str)) or owner not in records:
            raise UserError(f"{path}: annotations[{number}] belongs to image_id {owner}, but no image has that id.")
        records[owner].annotations.append((number, annotation))
    return CocoFile(path, list(records.values()), categories)


def _image_folder(path: Path, names: Sequence[str], folders: Sequence[Path]) -> Path:
    for folder in folders:
        if any((folder / name).is_file() for name in names[:10]):
            return folder
    if not names:
        raise UserError(f"{path}: it lists no images.")
    tried = "\n  ".join(str(folder) for folder in folders)
    raise UserError(f"{path}: its images, such as '{names[0]}', are in none of\n  {tried}\nMove them to one of these.")


def parse_coco(
    annotations: Sequence[tuple[int, dict[str, Any]]],
    size_hw: Size,
    categories: Mapping[int, str],
    class_ids: Mapping[str, int],
) -> ParsedLabels:
    """Objects of one image of a COCO file; "line" is the place in `annotations`.

    Boxes (x, y, width, height in pixels) are cut to the image. Crowd regions are left out. Polygons of several parts
    become one, part after part; run-length masks leave the box alone.

    Args:
        annotations: (number, record) of the image.
        size_hw: height and width of the image in pixels.
        categories: category id → name.
        class_ids: name → class.
    """
    classes: list[int] = []
    boxes: list[float] = []
    polygons: list[NDArray[np.float64]] = []
    problems: list[tuple[int | None, str]] = []
    unknown: list[tuple[int, str]] = []
    seen: set[tuple[float, ...]] = set()
    duplicates = 0
    height, width = size_hw
    for number, record in annotations:
        if record.get("iscrowd"):
            continue
        box = _numbers(record.get("bbox"))
        if box is None or len(box) != 4 or box[2] < 0 or box[3] < 0:
            found = json.dumps(record.get("bbox"))[:60]
            problems.append((number, f"bbox is {found}, expected x, y, width, height in pixels"))
            continue
        fractions = _clipped_fractions(box[0], box[1], box[0] + box[2], box[1] + box[3], size_hw)
        if fractions is None:
            problems.append((number, f"bbox {box} lies outside the image of {width} x {height} pixels"))
            continue
        category = record.get("category_id")
        name = categories.get(category) if isinstance(category, int) else None
        if name is None or name not in class_ids:
            unknown.append((number, f"category {category!r}" if name is None else f"'{name}'"))
            continue
        polygon = _coco_polygon(record.get("segmentation"), size_hw)
        key = (class_ids[name], *box, *polygon.ravel().tolist())
        if key in seen:
            duplicates += 1
            continue
        seen.add(key)
        classes.append(class_ids[name])
        boxes.extend(fractions)
        polygons.append(polygon)
    return ParsedLabels(classes, boxes, polygons if any(map(len, polygons)) else (), duplicates, problems, unknown)


def _numbers(value: Any) -> list[float] | None:
    """A list of finite numbers, None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        return None
    try:
        numbers = [float(item) for item in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _coco_polygon(segmentation: Any, size_hw: Size) -> NDArray[np.float64]:
    """All parts of a polygon, end to end, as fractions cut to the image; (0, 2) for a mask or nothing."""
    parts = [_numbers(part) for part in segmentation] if isinstance(segmentation, list) else []
    points = [np.array(part).reshape(-1, 2) for part in parts if part and len(part) >= 6 and len(part) % 2 == 0]
    if not points:
        return np.zeros((0, 2))
    height, width = size_hw
    return np.clip(np.concatenate(points) / (width, height), 0.0, 1.0)
