"""Self-contained HTML pages: they load nothing, run only their own script, show names as text, and have image crops.

Crops are JPEG data URIs, within a budget of bytes and decoded pixels.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup, escape

from tessera.analysis.error_analysis import Box
from tessera.data.source.decode import REDUCTIONS, UnusableImage, decoded_size, read_image
from tessera.utils.bit_depth import PixelRule, Pixels
from tessera.utils.errors import UserError
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import DatasetIndex

_FILES = Path(__file__).parent
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FILES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_COMMAND = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<!\S)(--[a-z][a-z0-9-]*)")


def render_page(template: str, **values: Any) -> str:
    """Render a template of this folder, with every text escaped; equal values give equal text.

    It also gets `policy`, `style` and `script`, and the filter `format_commands`.
    """
    style, script = ((_FILES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"
    return _ENVIRONMENT.get_template(template).render(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=Markup(style),  # a file of this package
        script=Markup(script),
        **values,
    )


def format_commands(text: str) -> Markup:
    """Escape a sentence, with commands in backticks and flags as code."""
    marked = _COMMAND.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(_FLAG.sub(r'<span class="flag">\1</span>', marked))  # it is escaped above


_ENVIRONMENT.filters["format_commands"] = format_commands


def _digest(text: str) -> str:
    """Return a source of a content security policy that allows only this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ------------------------------------------------------------------------------------------------ image crops

SIDE = 220  # pixels of the longer side of a copy
BYTES = 3_000_000  # of all copies, as text
DECODED = 300_000_000  # pixels of their files; where a decoder reduces them, it takes about that much less time
_AROUND = 0.6  # of the boxes, that is shown on each side of them
_LEAST = 48  # pixels of the image that a crop shows at least
_QUALITY = 78


class Subject(NamedTuple):
    """Subject of a crop: dataset index of the image, box of a label and of a detection, either may be None."""

    image: int
    labelled: Box | None
    found: Box | None


class Crop(NamedTuple):
    """A JPEG, its size and boxes; `uri` is "" if the file cannot be read or the budget is spent."""

    uri: str = ""
    width: int = 0
    height: int = 0
    marks: Sequence[dict[str, Any]] = ()


class ThumbnailEncoder:
    """Encoder of small image copies within the budget; `rule` maps more than 8 bits per channel."""

    def __init__(self, rule: PixelRule | None) -> None:
        self._rule, self._bytes, self._pixels = rule, 0, 0
        self._whole: dict[str, str] = {}

    def read(self, path: Path, size_hw: tuple[int, int], longest: int) -> Pixels | None:
        """Return the image, reduced while `longest` stays at least `SIDE`; None if unreadable or over budget."""
        reduction = next((by for by in REDUCTIONS if longest >= SIDE * by), 1)
        self._pixels += size_hw[0] * size_hw[1] // reduction
        if self._bytes > BYTES or self._pixels > DECODED:
            return None
        try:
            return read_image(path, reduction, self._rule)
        except (UnusableImage, UserError, OSError):  # it is listed without a copy
            return None

    def encode(self, part: Pixels) -> Crop:
        """Scale a part of an image to `SIDE` and encode it."""
        factor = SIDE / max(part.shape[:2])
        width, height = (max(round(side * factor), 1) for side in (part.shape[1], part.shape[0]))
        small = cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
        done, encoded = cv2.imencode(
            ".jpg", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY]
        )
        assert done, part.shape
        uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
        self._bytes += len(uri)
        return Crop(uri, width, height)

    def whole(self, path: str) -> str:
        """Return the data URI of a whole image; "" without one."""
        if path not in self._whole:
            self._whole[path] = ""
            with suppress(UnusableImage, UserError, OSError):
                size_hw = decoded_size(path, Path(path).stat().st_size)
                if (image := self.read(Path(path), size_hw, max(size_hw))) is not None:
                    self._whole[path] = self.encode(image).uri
        return self._whole[path]


def render_crops(index: DatasetIndex, subjects: Sequence[Subject]) -> list[Crop]:
    """Return a crop for each subject; each file is decoded once, in order, until the budget is spent."""
    copies, crops = ThumbnailEncoder(index.pixels), [Crop()] * len(subjects)
    by_image: dict[int, list[int]] = {}
    for place, subject in enumerate(subjects):
        by_image.setdefault(subject.image, []).append(place)
    for image, own in by_image.items():
        height, width = index.sizes_hw[image].tolist()
        windows = [_window(subjects[place], width, height) for place in own]
        least = min(max(x2 - x1, y2 - y1) for x1, y1, x2, y2 in windows)
        pixels = copies.read(index.path(image), (height, width), least)
        if pixels is None:
            continue
        for place, (left, top, right, bottom) in zip(own, windows, strict=True):
            scale = pixels.shape[1] / width
            x1, y1, x2, y2 = (round(side * scale) for side in (left, top, right, bottom))
            crop = copies.encode(pixels[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)])
            zoom = crop.width / (right - left)
            boxes = (("true", subjects[place].labelled), ("found", subjects[place].found))
            marks = [_mark(kind, np.subtract(box, [left, top] * 2) * zoom) for kind, box in boxes if box is not None]
            crops[place] = crop._replace(marks=marks)
    return crops


def _window(subject: Subject, width: int, height: int) -> tuple[int, int, int, int]:
    """Return the window shown around a subject: x1, y1, x2, y2."""
    boxes = np.array([box for box in (subject.found, subject.labelled) if box is not None])
    (x1, y1), (x2, y2) = boxes[:, :2].min(0), boxes[:, 2:].max(0)
    side = max(x2 - x1, y2 - y1)
    margin = max(_AROUND * side, (_LEAST - side) / 2)
    corners = np.clip([x1 - margin, y1 - margin, x2 + margin, y2 + margin], 0, [width, height] * 2)
    left, top, right, bottom = (int(v) for v in corners.round())
    return min(left, width - 1), min(top, height - 1), max(right, left + 1), max(bottom, top + 1)


def _mark(kind: str, box_xyxy: np.ndarray) -> dict[str, Any]:
    """Return a box in pixels of a crop, "true", the label's, or "found", the detection's."""
    x1, y1, x2, y2 = box_xyxy.tolist()
    sides = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}
    return {"kind": kind, **{name: round(side, 1) for name, side in sides.items()}}
