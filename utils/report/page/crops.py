"""Parts of pictures with boxes on them, within a budget of bytes and of pixels to decode."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tessera.data.source.decode import REDUCTIONS, read_image
from tessera.utils.diagnosis.listing import Box
from tessera.utils.errors import UserError
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import Pixels
from tessera.utils.types import DatasetIndex

SIDE = 220  # pixels of a crop
BYTES = 3_000_000  # of all crops, as text
DECODED = 200_000_000  # pixels of their files; where a decoder reduces them, it takes about that much less time
_AROUND = 0.6  # of the boxes, that is shown on each side of them
_LEAST = 48  # pixels of the picture that a crop shows at least
_QUALITY = 78


class Subject(NamedTuple):
    """What a crop shows: an image's index, the box of a label and that of a detection, either of which may be None."""

    image: int
    labelled: Box | None
    found: Box | None


class Mark(NamedTuple):
    """A box on a crop, in its pixels: the label's or the detection's."""

    kind: str
    x: float
    y: float
    width: float
    height: float


class Crop(NamedTuple):
    """A part of a picture.

    Attributes:
        uri: the part; "" where the file cannot be read, or no room is left.
        width, height: of it.
        marks: on it.
    """

    uri: str
    width: int
    height: int
    marks: list[Mark]


NO_CROP = Crop("", 0, 0, [])


def crops_of(index: DatasetIndex, subjects: Sequence[Subject]) -> Iterator[tuple[int, Crop]]:
    """Crops by their places in `subjects`, each file decoded once, the first ones first, until a budget is spent."""
    by_image: dict[int, list[int]] = {}
    for place, subject in enumerate(subjects):
        by_image.setdefault(subject.image, []).append(place)
    size = pixels = 0
    for image, own in by_image.items():
        height, width = index.sizes_hw[image].tolist()
        windows = [_window(subjects[place], width, height) for place in own]
        least = min(max(x2 - x1, y2 - y1) for x1, y1, x2, y2 in windows)
        reduction = next((by for by in REDUCTIONS if least >= SIDE * by), 1)
        pixels += height * width // reduction
        if size > BYTES or pixels > DECODED:
            return
        try:
            picture = read_image(index.path(image), reduction, index.pixels)
        except UserError:  # it is listed without a crop
            continue
        for place, window in zip(own, windows, strict=True):
            crop = _crop(picture, picture.shape[1] / width, window, subjects[place])
            size += len(crop.uri)
            yield place, crop


def _window(subject: Subject, width: int, height: int) -> tuple[int, int, int, int]:
    """What is shown of a picture around its subject: x1, y1, x2, y2."""
    boxes = np.array([box for box in (subject.found, subject.labelled) if box is not None])
    (x1, y1), (x2, y2) = boxes[:, :2].min(0), boxes[:, 2:].max(0)
    side = max(x2 - x1, y2 - y1)
    margin = max(_AROUND * side, (_LEAST - side) / 2)
    corners = np.clip([x1 - margin, y1 - margin, x2 + margin, y2 + margin], 0, [width, height] * 2)
    left, top, right, bottom = (int(v) for v in corners.round())
    return min(left, width - 1), min(top, height - 1), max(right, left + 1), max(bottom, top + 1)


def _crop(picture: Pixels, scale: float, window: tuple[int, int, int, int], subject: Subject) -> Crop:
    x1, y1, x2, y2 = (round(side * scale) for side in window)
    part = picture[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
    factor = SIDE / max(part.shape[:2])
    width, height = (max(round(side * factor), 1) for side in (part.shape[1], part.shape[0]))
    resized = cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(resized, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done, part.shape
    uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
    boxes = (("true", subject.labelled), ("found", subject.found))
    zoom = width / (window[2] - window[0])
    return Crop(uri, width, height, [_mark(kind, box, window, zoom) for kind, box in boxes if box is not None])


def _mark(kind: str, box: Box, window: tuple[int, int, int, int], zoom: float) -> Mark:
    x1, y1, x2, y2 = box
    left, top = window[:2]
    sides = (x1 - left, y1 - top, x2 - x1, y2 - y1)
    return Mark(kind, *(round(float(side) * zoom, 1) for side in sides))
