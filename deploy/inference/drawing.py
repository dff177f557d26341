"""Images with boxes: class colours, fonts, labels, and grids in one JPEG.

Fonts come with matplotlib or are installed on the machine; nothing is downloaded.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, cast

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tessera.utils.bit_depth import Pixels
from tessera.utils.files import atomic_write
from tessera.utils.machine.opencv import cv2
from tessera.utils.thresholds import DEFAULT_CONF

log = logging.getLogger(__name__)

MAX_IMAGES = 16
MAX_SIDE = 1920  # pixels of the whole grid
MIN_TILE = 320  # small images are enlarged to this, else no label would be legible
_CAPTION = (40, 40, 40)  # RGB behind a file name
_AROUND = 255  # grey level beside an image that does not fill its tile
# Chosen one after the other, each as far as possible from all before it and from grey in OKLab (Ottosson 2020),
# within lightness 0.48-0.82, so that each shows on a photograph and on white paper.
# fmt: off
_COLOURS = (
    0xE73830, 0x00D700, 0x4808FF, 0x30BFFF, 0xEF00FF, 0xF7B728, 0x007800, 0xFF9FDF,
    0x873897, 0x0068AF, 0x70AF80, 0x9F80FF, 0x976800, 0xFF209F, 0x9700F7, 0xB7708F,
    0xAF0058, 0xFF8F78, 0x008787, 0x00DFCF, 0xB7B7FF, 0xA7CF48, 0x4070FF, 0xC750C7,
)
# fmt: on

# Families with the scripts that DejaVu Sans lacks, in order of preference; used where they are installed.
_WIDE_FAMILIES = (
    *(f"Noto Sans CJK {region}" for region in ("SC", "JP", "KR", "TC")),
    *("Noto Sans SC", "Noto Sans JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAGothic"),
    *("Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Malgun Gothic"),
    *(f"Noto Sans {script}" for script in ("Thai", "Devanagari", "Bengali", "Tamil", "Telugu", "Khmer", "Ethiopic")),
    *("Loma", "Lohit Devanagari", "FreeSans", "Arial Unicode MS"),
)

_NOTO = re.compile(r"NotoSans\w*-Regular\.tt[cf]")  # files of the fonts that a message asks to install


class Style(NamedTuple):
    """Style of drawn boxes: line width in pixels (0 = automatic), class names, confidences."""

    line_width: int = 0
    labels: bool = True
    scores: bool = True


class Annotations(NamedTuple):
    """Boxes to draw on one image.

    Attributes:
        boxes_xyxy: float (n, 4), pixels of that image.
        classes: int (n,), -1 for an ignored region, drawn in white and black.
        scores: float (n,), or None for labels.
        ids: int64 (n,), track ids, written as #3 after the name if not negative; or None.
        threshold: of the scores, named where nothing was detected.
    """

    boxes_xyxy: NDArray[np.float32]
    classes: NDArray[np.int64]
    scores: NDArray[np.float32] | None = None
    ids: NDArray[np.int64] | None = None
    threshold: float = DEFAULT_CONF

    def above(self, confidence: float) -> Annotations:
        """Return the detections with at least this confidence."""
        assert self.scores is not None and self.ids is None
        keep = self.scores.astype(np.float64) >= confidence
        return Annotations(self.boxes_xyxy[keep], self.classes[keep], self.scores[keep], threshold=confidence)


def save_grid(
    images: Sequence[Pixels],
    annotations: Sequence[Annotations],
    names: Sequence[str],
    captions: Sequence[str],
    target: Path,
) -> None:
    """Write `grid` as a JPEG, atomically."""
    image = Image.fromarray(grid(images, annotations, names, captions))
    with atomic_write(target) as file:  # full chroma resolution, for thin coloured lines
        image.save(file, "JPEG", quality=92, subsampling=0)


def draw_annotations(image: Pixels, marks: Annotations, names: Sequence[str], style: Style) -> Pixels:
    """Return a copy of an image, uint8 (h, w, 3) RGB, with boxes and labels."""
    copy = np.array(image, np.uint8, order="C")
    longest = max(copy.shape)
    size = round(max(longest / 80, min(max(longest / 40, 11), 20)))
    _paint(copy, marks, names, size, style, [])
    return copy


def grid(
    images: Sequence[Pixels], annotations: Sequence[Annotations], names: Sequence[str], captions: Sequence[str]
) -> Pixels:
    """Arrange up to 16 images (h, w, 3) RGB of any size, with their boxes clipped to them, at one scale.

    Captions are one per image, or none. Returns uint8 (H, W, 3) RGB, no side above 1920.
    """
    images = images[:MAX_IMAGES]
    height, width = (max(image.shape[side] for image in images) for side in (0, 1))
    columns = min(math.ceil(math.sqrt(len(images) * height / width)), len(images))
    rows = math.ceil(len(images) / columns)
    fit = min(MAX_SIDE / (columns * width), MAX_SIDE / (rows * height))
    scale = min(fit, max(1.0, MIN_TILE / max(height, width)))
    place_h, place_w = max(round(height * scale), 1), max(round(width * scale), 1)
    place_h, place_w = min(place_h, MAX_SIDE // rows), min(place_w, MAX_SIDE // columns)
    sheet = np.full((rows * place_h, columns * place_w, 3), _AROUND, np.uint8)
    for i, (image, marks) in enumerate(zip(images, annotations, strict=True)):
        h, w = image.shape[:2]
        tile_h, tile_w = max(round(h * place_h / height), 1), max(round(w * place_w / width), 1)
        tile = cv2.resize(image, (tile_w, tile_h), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
        tile = cast(Pixels, np.ascontiguousarray(tile, np.uint8))
        factors = np.array([tile_w / w, tile_h / h] * 2)
        _annotate(tile, marks._replace(boxes_xyxy=marks.boxes_xyxy * factors), names, captions[i] if captions else "")
        tile[-1:] = tile[:, -1:] = 255  # a white seam between neighbours
        top = i // columns * place_h + (place_h - tile_h) // 2
        left = i % columns * place_w + (place_w - tile_w) // 2
        sheet[top : top + tile_h, left : left + tile_w] = tile
    return sheet


def _annotate(tile: Pixels, marks: Annotations, names: Sequence[str], caption: str) -> None:
    """Draw boxes, labels and caption into `tile`, in place."""
    height, width = tile.shape[:2]
    size = int(np.clip(max(height, width) / 40, 11, 20))
    title = _label(caption, size, width, 0)
    taken = [(0, 0, title.shape[1], title.shape[0])] if caption else []
    _paint(tile, marks, names, size, Style(), taken)
    if marks.scores is not None and len(marks.scores) == 0:
        note = _label(f"nothing above {marks.threshold:.3g}", size, width, 0)
        _stamp(tile, note, ((width - note.shape[1]) // 2, (height - note.shape[0]) // 2), _CAPTION)
    if caption:
        _stamp(tile, title, (0, 0), _CAPTION)  # over the boxes


def _paint(
    tile: Pixels,
    marks: Annotations,
    names: Sequence[str],
    size: int,
    style: Style,
    taken: list[tuple[int, int, int, int]],
) -> None:
    """Draw boxes and labels of `size` pixels in place; labels avoid the rectangles in `taken`."""
    height, width = tile.shape[:2]
    thickness = style.line_width or max(round(max(height, width) / 240), 2)
    area = np.prod(marks.boxes_xyxy[:, 2:] - marks.boxes_xyxy[:, :2], axis=1)
    order = np.argsort(-area, kind="stable")  # small boxes last, lest a large one hide them
    corners = np.round(np.clip(marks.boxes_xyxy, 0, [width - 1, height - 1] * 2)).astype(int).tolist()
    for m in order:
        x1, y1, x2, y2 = corners[m]
        ignored = marks.classes[m] < 0
        if ignored:  # white in black is visible on any image
            cv2.rectangle(tile, (x1, y1), (x2, y2), (0, 0, 0), 3 * thickness, cv2.LINE_AA)
        colour = (255, 255, 255) if ignored else class_colour(int(marks.classes[m]))
        cv2.rectangle(tile, (x1, y1), (x2, y2), colour, thickness, cv2.LINE_AA)

    if not style.labels:
        return
    for m in order if marks.scores is None else np.argsort(-marks.scores, kind="stable"):
        class_id = int(marks.classes[m])
        if class_id < 0:
            continue
        text = class_text(class_id, names[class_id]) if class_id < len(names) else str(class_id)
        figures = f" #{marks.ids[m]}" if marks.ids is not None and marks.ids[m] >= 0 else ""
        if marks.scores is not None and style.scores:
            figures += f" {marks.scores[m]:.2f}"
        mask = _label(text + figures, size, width // 2, len(figures))
        place = _free_place(corners[m], mask.shape, tile.shape, taken, thickness)
        if place is not None:  # in a crowd the box's colour must do; overlapping labels cannot be read
            taken.append(_stamp(tile, mask, place, class_colour(class_id)))


def _free_place(
    box: Sequence[int],
    label_hw: tuple[int, ...],
    tile_hw: tuple[int, ...],
    taken: Sequence[tuple[int, int, int, int]],
    thickness: int,
) -> tuple[int, int] | None:
    """Return left and top of the first free position for a label above, inside or below its box; None without one."""
    (x1, y1, x2, y2), edge = box, thickness // 2
    height, width = label_hw[:2]
    right, bottom = max(tile_hw[1] - width, 0), max(tile_hw[0] - height, 0)
    columns = (x1 - edge, x2 + edge + 1 - width)
    places = [(x, y) for y in (y1 - edge - height, y1, y2 - height, y2 + edge + 1) for x in columns]
    for x, y in ((min(max(x, 0), right), y) for x, y in places if 0 <= y <= bottom):
        if all(x >= r or y >= b or x + width <= left or y + height <= top for left, top, r, b in taken):
            return x, y
    return None


def _stamp(
    tile: Pixels, mask: NDArray[np.uint8], place: tuple[int, int], background: tuple[int, int, int]
) -> tuple[int, int, int, int]:
    """Draw a label, clipped to the tile; return its rectangle: left, top, right, bottom."""
    x, y = place
    region = tile[y : y + mask.shape[0], x : x + mask.shape[1]]
    region[:] = _shades(background)[mask[: region.shape[0], : region.shape[1]]]
    return x, y, x + region.shape[1], y + region.shape[0]


@lru_cache(maxsize=128)
def _shades(background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return uint8 (256, 3): the label's colour at each coverage by text."""
    alpha = np.arange(256, dtype=np.float32)[:, None] / 255
    shades = np.round(np.array(background) * (1 - alpha) + np.array(text_colour(background)) * alpha)
    return cast("NDArray[np.uint8]", shades.astype(np.uint8))


@lru_cache(maxsize=64)
def _font(file: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), size)  # Pillow takes a Path from 10.1 on


@lru_cache(maxsize=4096)  # names with each of their scores
def _label(text: str, size: int, width: int, keep_end: int) -> NDArray[np.uint8]:
    """Render a line of text as coverage 0-255 (h, w); OpenCV's own fonts have only ASCII.

    Text wider than `width` pixels loses its middle, and keeps its last `keep_end` characters.
    """
    text, margin = drawable(text, 200) or " ", size // 4
    head, end = text[: len(text) - keep_end], text[len(text) - keep_end :]
    while head and _length(text, size) + 2 * margin > width:
        head = head[:-1]
        text = f"{head}…{end}"
    runs = [(_font(file, size), part) for file, part in font_runs(text)]
    ascent, descent = (max(heights) for heights in zip(*(font.getmetrics() for font, _ in runs), strict=True))
    canvas = Image.new("L", (math.ceil(_length(text, size)) + 2 * margin, ascent + descent))
    draw, at = ImageDraw.Draw(canvas), float(margin)
    for font, part in runs:
        draw.text((at, ascent), part, fill=255, font=font, anchor="ls")
        at += font.getlength(part)
    return np.asarray(canvas)


def _length(text: str, size: int) -> float:
    return sum(_font(file, size).getlength(part) for file, part in font_runs(text))


# ------------------------------------------------------------------------------------------------- colours and fonts


def class_colour(class_id: int) -> tuple[int, int, int]:
    """Return the RGB colour of a class, 0-255; the 24 colours repeat."""
    code = _COLOURS[class_id % len(_COLOURS)]
    return code >> 16, code >> 8 & 255, code & 255


def class_hex(class_id: int) -> str:
    """Return `class_colour` as "#rrggbb"."""
    return f"#{_COLOURS[class_id % len(_COLOURS)]:06x}"


def text_colour(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return black or white, whichever contrasts more with an RGB background (WCAG 2.1 relative luminance)."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 0.05 * 1.05 else (255, 255, 255)


@cache
def font_families() -> tuple[str, ...]:
    """Return font families for charts, each the fallback of the one before."""
    manager = font_manager.fontManager
    known = {entry.fname for entry in manager.ttflist}
    for file in font_manager.findSystemFonts():  # matplotlib keeps its list of fonts, also when more are installed
        if file not in known and _NOTO.fullmatch(Path(file).name):
            manager.addfont(file)
    installed = {entry.name for entry in manager.ttflist}
    return ("DejaVu Sans", *(family for family in _WIDE_FAMILIES if family in installed))


@cache
def _fonts() -> tuple[tuple[Path, frozenset[int]], ...]:
    """Return file and covered code points of each of `font_families`."""
    files = [Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"]
    files += [Path(font_manager.findfont(family)) for family in font_families()[1:]]
    return tuple((file, frozenset(FT2Font(str(file)).get_charmap())) for file in dict.fromkeys(files))


def font_runs(text: str) -> list[tuple[Path, str]]:
    """Split a text into parts, each with the first font file that has its characters."""

    def file(character: str) -> Path:
        return next((file for file, covered in _fonts() if ord(character) in covered), _fonts()[0][0])

    return [(font, "".join(part)) for font, part in groupby(text, file)]


@cache
def class_text(number: int, name: str) -> str:
    """Return the class name, preceded by the class number if some characters are in no font."""
    shown = drawable(name)
    if shown == " ".join(name.split()):
        return name
    _warn_of_fonts()
    return f"{number} {shown}"


@cache
def _warn_of_fonts() -> None:
    log.warning(
        "No installed font has all characters of the class names: images and charts show ? and the class number. "
        "Install Noto fonts, such as fonts-noto-cjk (Chinese, Japanese, Korean) and fonts-noto-core (other "
        "scripts) of Debian and Ubuntu."
    )


def drawable(text: str, limit: int = 1000) -> str:
    """Return `text` in one line of at most `limit` characters, with "?" for characters that no font has."""
    text = "".join(c if any(ord(c) in known for _, known in _fonts()) else "?" for c in " ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"
