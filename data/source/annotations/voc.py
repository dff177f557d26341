"""Pascal VOC XML, read as it is; nothing is converted on disk."""

from __future__ import annotations

import math
import xml.parsers.expat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.source.annotations.labels import ParsedLabels, Size, clipped_fractions


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
        box = clipped_fractions(left - 1, top - 1, right, bottom, size_hw)
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
