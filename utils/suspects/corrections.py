"""The label rows of an image, as text, and the same with suggestions applied."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.data.source.scan import ImageLabels
from tessera.utils.boxes import xyxy_to_cxcywh
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.suspects.evidence import Suspicion
from tessera.utils.suspects.ranking import Box, Suspect
from tessera.utils.text import shown
from tessera.utils.types import DatasetIndex, DatasetSpec


class Change(NamedTuple):
    """A row that was changed: what it was, "" where there was none, and what it is, "" where it is gone."""

    suspect: Suspect
    before: str
    after: str


class LabelRows(NamedTuple):
    """The rows of an image's label file, YOLO text, and in which of them each object is."""

    rows: list[str]
    places: Sequence[int]


def label_rows(index: DatasetIndex, image: int, labels: ImageLabels, spec: DatasetSpec) -> LabelRows:
    """Those of a text file as they are, of other annotations written as text.

    Raises:
        UserError: the file has changed since it was indexed.
    """
    classes, boxes = index.labels(image)
    if labels.file.endswith(".txt"):
        if len(labels.lines) < len(classes):
            raise UserError(f"{shown(Path(labels.file))}: it has changed since it was read. Run the command again.")
        return LabelRows(_text_rows(Path(labels.file)), [line - 1 for line in labels.lines])
    segments = index.segments(image) or [np.zeros((0, 2), np.float32)] * len(classes)
    height, width = index.sizes_hw[image].tolist()
    rows = []
    for c, box, polygon in zip(classes.tolist(), boxes.tolist(), segments, strict=True):
        own = (polygon / (width, height)).clip(0, 1).ravel().tolist()
        rows.append(_row(_number(spec, c), own) if own else box_row(spec, c, box, (height, width)))
    ignored = index.ignored(image)[1].tolist()
    rows += [box_row(spec, None, box, (height, width)) for box in ignored]
    return LabelRows(rows, range(len(classes)))


def corrected(
    found: LabelRows, suspects: Sequence[Suspect], spec: DatasetSpec, size_hw: tuple[int, int]
) -> list[Change]:
    """Apply what is suggested for an image to its rows, which are changed, and say what that is."""
    changes = []
    gone = []
    for suspect in suspects:
        if suspect.object < 0:
            before, place = "", len(found.rows)
            found.rows.append("")
        else:
            place = found.places[suspect.object]
            before = found.rows[place]
        found.rows[place] = after = _suggested(suspect, before, spec, size_hw)
        gone += [] if after else [place]
        changes.append(Change(suspect, before, after))
    for place in sorted(gone, reverse=True):
        del found.rows[place]
    return changes


def _suggested(suspect: Suspect, before: str, spec: DatasetSpec, size_hw: tuple[int, int]) -> str:
    """The row that a suspect should be; "" for none."""
    if suspect.suggested is None or suspect.suggested_box is None:
        return ""
    if suspect.kind is Suspicion.WRONG_CLASS:  # its polygon, where it has one, stays
        return " ".join([_number(spec, suspect.suggested), *before.split()[1:]])
    return box_row(spec, suspect.suggested, suspect.suggested_box, size_hw)


def box_row(spec: DatasetSpec, class_id: int | None, box: Box | Sequence[float], size_hw: tuple[int, int]) -> str:
    """A row of a label file; without a class, of a region to ignore."""
    height, width = size_hw
    sides = (np.array(box, np.float64) / (width, height, width, height)).clip(0, 1)
    return _row("-1" if class_id is None else _number(spec, class_id), xyxy_to_cxcywh(sides).tolist())


def _row(number: str, shares: Sequence[float]) -> str:
    return " ".join([number, *(f"{share:.9g}" for share in shares)])


def _number(spec: DatasetSpec, class_id: int) -> str:
    """What a label file calls a class; one that is merged of several by the first of them."""
    name = spec.parts[class_id][0] if spec.parts else spec.names[class_id]
    return str((spec.label_names or spec.names).index(name))


def _text_rows(path: Path) -> list[str]:
    """The lines of a label file; none where it is not there."""
    try:
        with open_plain(path) as file:
            raw = file.read().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        return []
    return [line.decode("utf-8", "surrogateescape") for line in raw.splitlines()]
