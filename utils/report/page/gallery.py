"""The worst errors with their pictures, within a budget of bytes and of pixels to decode."""

from __future__ import annotations

import base64
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tessera.data.source.decode import REDUCTIONS, read_image
from tessera.utils.diagnosis.files import NAMES
from tessera.utils.diagnosis.gains import ERROR_KINDS
from tessera.utils.diagnosis.listing import Box, ErrorItem
from tessera.utils.errors import UserError
from tessera.utils.evaluation.matching import Kind
from tessera.utils.evaluation.tally import Errors
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import Pixels
from tessera.utils.report.page.breakdown import sides_as_seen
from tessera.utils.report.page.confusion import in_words, most_confused
from tessera.utils.report.page.facts import Facts, readable

WORST = 60  # errors that are shown for their cost alone
OF_A_KIND = 10  # that are shown beside them
OF_A_CELL = 2  # of the confusion matrix that is shown
MOST = 140
SIDE = 220  # pixels of a crop
BYTES = 3_000_000  # of all crops, as text
DECODED = 200_000_000  # pixels of their files; where a decoder reduces them, it takes about that much less time
_AROUND = 0.6  # of the boxes, that is shown on each side of them
_LEAST = 48  # pixels of the picture that a crop shows at least
_QUALITY = 78
_SIZES = ((32, "small"), (96, "medium"), (np.inf, "large"))  # COCO's, in the picture as the model sees it


Pair = tuple[int, int]


class Mark(NamedTuple):
    """A box on a crop, in its pixels: the object's or the detection's."""

    kind: str
    x: float
    y: float
    width: float
    height: float


class Shown(NamedTuple):
    """An error of the gallery.

    Attributes:
        number: its place by cost among all that were kept, from 1.
        kind: its name.
        predicted, true: names of the classes; "" of what is none.
        pair: "predicted true", the cell of the confusion matrix by indices, -1 of background.
        cell: that in words.
        size: of the object, or of the detection where there is none: "small", "medium" or "large".
        image: name of the file.
        says: what it is, in a sentence.
        details: figures.
        label: the file of the label with its line.
        uri: the crop; "" where the file cannot be read, or no room is left.
        width, height: of the crop.
        marks: on it.
    """

    number: int
    kind: str
    predicted: str
    true: str
    pair: str
    cell: str
    size: str
    image: str
    says: str
    details: str
    label: str
    uri: str
    width: int
    height: int
    marks: list[Mark]


class _Crop(NamedTuple):
    uri: str
    width: int
    height: int
    marks: list[Mark]


_NO_CROP = _Crop("", 0, 0, [])


def chosen(items: Sequence[ErrorItem], cells: Sequence[Pair], classes: frozenset[int]) -> list[int]:
    """Which errors are shown, by cost: the worst of all, of each kind, of each cell of the matrix; then the next worst.

    Args:
        items: errors by cost.
        cells: `cells_of` them.
        classes: that the confusion matrix has, background among them.
    """
    taken = dict.fromkeys(range(min(WORST, len(items))))
    of_kind, of_cell = Counter(items[row].kind for row in taken), Counter(cells[row] for row in taken)
    for row in range(len(taken), len(items)):
        kind, cell = items[row].kind, cells[row]
        if of_kind[kind] < OF_A_KIND or (of_cell[cell] < OF_A_CELL and classes.issuperset(cell)):
            taken[row] = None
            of_kind[kind] += 1
            of_cell[cell] += 1
    taken |= dict.fromkeys(range(min(MOST, len(items))))
    return sorted(list(taken)[:MOST])


def cells_of(errors: Errors, items: Sequence[ErrorItem]) -> list[Pair]:
    """The cell of the confusion matrix that each error is in: predicted and true class, -1 of background.

    A pair of classes has the most confident detection of another class on an object that none is correct for.
    """
    places = dict(zip(errors.images.tolist(), errors.offsets[:-1].tolist(), strict=True))
    confused: dict[tuple[int, int], int] = {}
    for row in sorted(range(len(items)), key=lambda row: -items[row].score):
        item = items[row]
        own = places[item.image] + item.object
        if item.kind is Kind.WRONG_CLASS and errors.outcomes[own] == Kind.WRONG_CLASS:
            confused.setdefault((item.image, item.object), row)
    pairs = set(confused.values())
    cells = []
    for row, item in enumerate(items):
        predicted, true = (-1 if c is None else c for c in (item.predicted, item.true))
        cells.append((predicted, true if row in pairs or item.kind is Kind.MISSED else -1))
    return cells


def gallery(facts: Facts) -> list[Shown]:
    """The errors that are shown, by cost."""
    cells = cells_of(facts.found.errors, facts.items)
    rows = chosen(facts.items, cells, frozenset({-1, *most_confused(facts.found.errors.confusion).tolist()}))
    crops = dict(_crops(facts, rows))
    return [_shown(facts, row, cells[row], crops.get(row, _NO_CROP)) for row in rows]


def _crops(facts: Facts, rows: Sequence[int]) -> Iterator[tuple[int, _Crop]]:
    """Crops of these errors, each file decoded once, the most costly first, until a budget is spent."""
    by_image: dict[int, list[int]] = {}
    for row in rows:
        by_image.setdefault(facts.items[row].image, []).append(row)
    size = pixels = 0
    for image, own in by_image.items():
        height, width = facts.index.sizes_hw[image].tolist()
        windows = [_window(facts.items[row], width, height) for row in own]
        least = min(max(x2 - x1, y2 - y1) for x1, y1, x2, y2 in windows)
        reduction = next((by for by in REDUCTIONS if least >= SIDE * by), 1)
        pixels += height * width // reduction
        if size > BYTES or pixels > DECODED:
            return
        try:
            picture = read_image(facts.index.path(image), reduction, facts.index.pixels)
        except UserError:  # it is listed without a crop
            continue
        for row, window in zip(own, windows, strict=True):
            crop = _crop(picture, picture.shape[1] / width, window, facts.items[row])
            size += len(crop.uri)
            yield row, crop


def _window(item: ErrorItem, width: int, height: int) -> tuple[int, int, int, int]:
    """What is shown of a picture around an error: x1, y1, x2, y2."""
    boxes = np.array([box for box in (item.box, item.true_box) if box is not None])
    (x1, y1), (x2, y2) = boxes[:, :2].min(0), boxes[:, 2:].max(0)
    side = max(x2 - x1, y2 - y1)
    margin = max(_AROUND * side, (_LEAST - side) / 2)
    corners = np.clip([x1 - margin, y1 - margin, x2 + margin, y2 + margin], 0, [width, height] * 2)
    left, top, right, bottom = (int(v) for v in corners.round())
    return min(left, width - 1), min(top, height - 1), max(right, left + 1), max(bottom, top + 1)


def _crop(picture: Pixels, scale: float, window: tuple[int, int, int, int], item: ErrorItem) -> _Crop:
    x1, y1, x2, y2 = (round(side * scale) for side in window)
    part = picture[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
    factor = SIDE / max(part.shape[:2])
    width, height = (max(round(side * factor), 1) for side in (part.shape[1], part.shape[0]))
    resized = cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(resized, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done, part.shape
    uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
    boxes = (("true", item.true_box), ("found", item.box))
    zoom = width / (window[2] - window[0])
    return _Crop(uri, width, height, [_mark(kind, box, window, zoom) for kind, box in boxes if box is not None])


def _mark(kind: str, box: Box, window: tuple[int, int, int, int], zoom: float) -> Mark:
    x1, y1, x2, y2 = box
    left, top = window[:2]
    sides = (x1 - left, y1 - top, x2 - x1, y2 - y1)
    return Mark(kind, *(round(float(side) * zoom, 1) for side in sides))


def _shown(facts: Facts, row: int, cell: Pair, crop: _Crop) -> Shown:
    item = facts.items[row]
    predicted, true = ("" if c is None else facts.name(c) for c in (item.predicted, item.true))
    labels = facts.labels.get(item.image)
    line, own = labels.place(item.object) if labels else (None, None)
    place = "" if labels is None else readable(labels.file, 200)
    place += f":{line}" if line is not None else f", id {readable(str(own))}" if own is not None else ""
    box = item.box if item.true_box is None else item.true_box
    assert box is not None, "an error has a box"
    (side,) = sides_as_seen(facts.index, np.array([item.image]), np.array([box], np.float32), facts.origin.imgsz)
    figures = [f"cost {item.cost:.5f}", f"confidence {item.score:.2f}"]
    figures += [] if item.iou is None else [f"IoU {item.iou:.2f}"]
    return Shown(
        row + 1,
        NAMES[item.kind],
        predicted,
        true,
        f"{cell[0]} {cell[1]}",
        in_words(*(None if c < 0 else facts.name(c) for c in cell)),
        next(name for above, name in _SIZES if side < above),
        readable(facts.index.path(item.image).name, 100),
        _sentence(item.kind, predicted, true, is_found=item.kind is Kind.WRONG_CLASS and cell[1] < 0),
        ", ".join(figures),
        place,
        *crop,
    )


def _sentence(kind: Kind, predicted: str, true: str, *, is_found: bool) -> str:
    """What an error is; `is_found`: a detection of a wrong class is not the only one of its object."""
    return {
        Kind.WRONG_CLASS: f"{true} {'also ' * is_found}taken for {predicted}",
        Kind.BADLY_PLACED: f"{predicted}, badly placed",
        Kind.BOTH: f"{predicted} near {true}",
        Kind.DUPLICATE: f"{predicted} found twice",
        Kind.BACKGROUND: f"{predicted} where nothing is labelled",
        Kind.MISSED: f"{true} not found",
    }[kind]


def kinds_shown(shown: Sequence[Shown]) -> list[str]:
    """The kinds that are in the gallery, in their order."""
    there = {error.kind for error in shown}
    return list(itertools.compress(names := [NAMES[kind] for kind in ERROR_KINDS], (name in there for name in names)))
