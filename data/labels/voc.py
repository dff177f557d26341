"""Pascal VOC XML annotations, read without conversion."""

from __future__ import annotations

import codecs
import math
import re
import xml.parsers.expat
from collections.abc import Mapping
from typing import Any

from tessera.data.labels.yolo_labels import Corners, ParsedLabels, Size, clipped_box
from tessera.utils.text import one_line, shown

_MOST_DEPTH = 32
_INVALID_TOKEN = xml.parsers.expat.errors.codes[xml.parsers.expat.errors.XML_ERROR_INVALID_TOKEN]
_DECLARED = re.compile(
    rb"""(?:\xef\xbb\xbf)?\s{0,99}<\?xml[^>]{0,200}?\sencoding\s{0,9}=\s{0,9}["']([\w.:-]{1,40})["']"""
)
# Multi-byte encoding → the superset that files declare as it (WHATWG Encoding standard, 4.2).
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "cp950"}
_MULTI_BYTE = ("big5hkscs", "cp932", "cp949", "cp950", "euc_jp", "gb18030", "hz", "iso2022_jp", "utf-8")


def parse_voc(raw: bytes, size_hw: Size, class_ids: Mapping[str, int]) -> ParsedLabels:
    """Parse a Pascal VOC annotation.

    Coordinates are 1-based pixels, both ends included (VOC 2012 development kit, 3.3): a box covers [xmin − 1, xmax].
    Difficult objects and classes below 0 in `class_ids` become ignored regions. Entities and deep nesting are refused.
    """
    try:
        reader = _parse(raw)
    except _InvalidVoc as error:
        return ParsedLabels(problems=[(error.line, str(error))])
    if reader.root != "annotation":
        return ParsedLabels(problems=[(1, f"the root is <{one_line(reader.root, 40)}>, expected <annotation>")])
    labels = ParsedLabels()
    for line, fields in reader.objects:
        name = fields.get("name", "")
        corners = _voc_corners(fields)
        box = corners if isinstance(corners, str) else clipped_box(corners, size_hw, origin=1)
        if fields.get("difficult") == "1" or class_ids.get(name, 0) < 0:
            if isinstance(box, str):
                labels.remarks.append((line, f"{box}; ignored region skipped"))
            elif name in class_ids:
                labels.ignore(class_ids[name], box)
            else:
                labels.unknown.append((line, shown(name)))
        elif isinstance(corners, str):
            labels.rejected_rows.append((line, corners))
        elif name not in class_ids:
            labels.unknown.append((line, shown(name)))
        elif isinstance(box, str):
            labels.rejected_rows.append((line, box))
        else:
            labels.add(line, (class_ids[name], *corners), class_ids[name], box)
    height, width = (reader.size.get(side, "") for side in ("height", "width"))
    is_stated = all(text.isdecimal() and len(text) < 10 and int(text) > 0 for text in (height, width))
    labels.stated_hw = (int(height), int(width)) if is_stated else (0, 0)
    return labels.finish()


class _InvalidVoc(Exception):
    """Error of an XML file that cannot be parsed, or that has content no annotation needs."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def _parse(raw: bytes) -> _VocReader:
    declared = _DECLARED.match(raw)
    name = declared[1].decode() if declared else "utf-8"
    try:
        # Expat itself decodes UTF-8, UTF-16 and single-byte encodings.
        codec = codecs.lookup(name).name
        codec = _SUPERSETS.get(codec, codec)
        is_decoded = declared is not None and codec in _MULTI_BYTE
        reader = _VocReader("utf-8" if is_decoded else None)
        reader.parser.Parse(raw.decode(codec).encode() if is_decoded else raw, True)
    except xml.parsers.expat.ExpatError as error:
        what = f"not valid XML ({xml.parsers.expat.ErrorString(error.code)})"
        if error.code == _INVALID_TOKEN and raw.decode(errors="ignore").encode() != raw:
            what += f"; its bytes are not {name}. Save it as UTF-8, or let its first line declare its encoding"
        raise _InvalidVoc(error.lineno, what) from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _InvalidVoc(line, f"it declares {name}, but byte 0x{raw[error.start]:02x} is no such text") from error
    except (LookupError, ValueError) as error:
        what = f"it declares the encoding {shown(name, 40)}, which is unknown. Save it as UTF-8"
        raise _InvalidVoc(1, what) from error
    return reader


class _VocReader:
    """Expat handler that collects <size> and the <object>s with their lines; <part>s are skipped."""

    def __init__(self, encoding: str | None) -> None:
        self.root = ""
        self.size: dict[str, str] = {}
        self.objects: list[tuple[int, dict[str, str]]] = []  # line, fields
        self._path: list[str] = []
        self._text: list[str] = []
        self.parser = xml.parsers.expat.ParserCreate(encoding)
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text.append
        self.parser.EntityDeclHandler = self._refuse

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if len(self._path) == _MOST_DEPTH:
            raise _InvalidVoc(self.parser.CurrentLineNumber, f"its elements nest deeper than {_MOST_DEPTH}")
        self.root = self.root or name
        self._path.append(name)
        self._text.clear()
        if self._path[1:] == ["object"]:
            self.objects.append((self.parser.CurrentLineNumber, {}))

    def _end(self, name: str) -> None:
        text = "".join(self._text).strip()
        inner = self._path[1:]
        if inner[:1] == ["object"] and (len(inner) == 2 or (inner[1:2] == ["bndbox"] and len(inner) == 3)):
            self.objects[-1][1][name] = text
        elif inner[:1] == ["size"] and len(inner) == 2:
            self.size[name] = text
        self._path.pop()
        self._text.clear()

    def _refuse(self, *declaration: Any) -> None:
        raise _InvalidVoc(self.parser.CurrentLineNumber, "it declares entities, which no annotation needs")


def _voc_corners(fields: Mapping[str, str]) -> Corners | str:
    """Return xmin, ymin, xmax, ymax, or a message."""
    corners: list[float] = []
    for key in ("xmin", "ymin", "xmax", "ymax"):
        text = fields.get(key)
        if text is None:
            return f"the object has no <{key}>"
        try:
            value = float(text)
        except ValueError:
            return f"<{key}> is '{one_line(text, 24)}', expected a number"
        if not math.isfinite(value):
            return f"<{key}> is {one_line(text, 24)}, expected a finite number"
        corners.append(value)
    left, top, right, bottom = corners
    if right < left or bottom < top:
        return f"xmax or ymax is smaller than xmin or ymin ({left:g} {top:g} {right:g} {bottom:g})"
    return left, top, right, bottom
