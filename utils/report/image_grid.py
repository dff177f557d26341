"""Images with boxes: grids in one JPEG, and the sample images of a validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import warn_on_error
from tessera.utils.files import atomic_write
from tessera.utils.machine.opencv import cv2
from tessera.utils.report.palette import class_colour, class_text, drawable, font_runs, text_colour
from tessera.utils.thresholds import DEFAULT_CONF
from tessera.utils.types import Batch, DatasetIndex, Detections

MAX_IMAGES = 16
MAX_SIDE = 1920  # pixels of the whole grid
MIN_TILE = 320  # small images are enlarged to this, else no label would be legible
SHOWN = 3 * MAX_IMAGES  # sample images of a validation
_SAMPLE_SIDE = MAX_SIDE // 4  # pixels of an image in a full grid
_CAPTION = (40, 40, 40)  # RGB behind a file name
_AROUND = 255  # grey level beside an image that does not fill its tile


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


def render_targets(batch: Batch, names: Sequence[str], captions: Sequence[str], target: Path) -> None:
    """Write the first 16 images of a training batch with their targets as a JPEG; arguments as of `grid`."""
    images = list(batch.images[:MAX_IMAGES].cpu().numpy())
    save_grid(images, [labelled(batch, image) for image in range(len(images))], names, captions, target)


def labelled(batch: Batch, image: int) -> Annotations:
    """Return the objects and ignored regions of one image of a batch."""
    rows = batch.targets[batch.targets[:, 0] == image].cpu().numpy()
    return Annotations(rows[:, 2:6], rows[:, 1].astype(np.int64))


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


class _Taken(NamedTuple):
    """An image without padding, its labels and predictions."""

    image: Pixels
    labelled: Annotations
    found: Annotations
    caption: str


class SampleImageCollector:
    """Collector of `images` images of a split, spread evenly over this rank's part, so that all shapes occur."""

    def __init__(self, index: DatasetIndex, ranks: int, images: int = SHOWN) -> None:
        self._index, self._most = index, images
        self._every = max(len(index) // (ranks * max(images, 1)), 1)
        self._seen = 0
        self._taken: list[_Taken] = []

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Collect the sampled images of a batch."""
        with warn_on_error("sample images of the validation"):
            for image in range(len(batch)):
                if self._seen % self._every == 0 and len(self._taken) < self._most:
                    self._taken.append(self._take(batch, image, found[image]))
                self._seen += 1

    def write(self, folder: Path, confidence: float) -> None:
        """Write `val_batch{0,1,2}_{labels,pred}.jpg`, 16 images each, with detections above a confidence."""
        grids = -(-len(self._taken) // MAX_IMAGES)
        for number in range(grids):
            taken = self._taken[number::grids]
            images, labels, _, captions = zip(*taken, strict=True)
            with warn_on_error(f"val_batch{number} images"):
                save_grid(images, labels, self._index.names, captions, folder / f"val_batch{number}_labels.jpg")
                self.write_predictions(folder / f"val_batch{number}_pred.jpg", confidence, taken)

    def write_predictions(self, target: Path, confidence: float, taken: Sequence[_Taken] = ()) -> None:
        """Write the predictions on some images, by default on the first 16."""
        taken = taken or self._taken
        found = [image.found.above(confidence) for image in taken]
        captions = [f"{image.caption} ≥ {confidence:.3f}" for image in taken]
        save_grid([image.image for image in taken], found, self._index.names, captions, target)

    def _take(self, batch: Batch, image: int, detections: Detections) -> _Taken:
        scale_x, scale_y, left, top = batch.placements[image].tolist()
        height, width = batch.sizes_hw[image].tolist()
        x1, y1, x2, y2 = (round(v) for v in (left, top, left + scale_x * width, top + scale_y * height))
        pixels = batch.images[image, y1:y2, x1:x2].cpu().numpy()
        shrunk = min(_SAMPLE_SIDE / max(pixels.shape), 1.0)
        if shrunk < 1:
            pixels = cv2.resize(pixels, None, fx=shrunk, fy=shrunk, interpolation=cv2.INTER_AREA)

        labels = labelled(batch, image)
        scores = detections.scores.float().cpu().numpy()
        scale = np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        boxes = detections.boxes_xyxy.float().cpu().numpy() * scale + np.array([left, top, left, top], np.float32)
        classes = detections.classes.cpu().numpy().astype(np.int64)
        corner = np.array([x1, y1, x1, y1], np.float32)
        return _Taken(
            pixels,
            labels._replace(boxes_xyxy=(labels.boxes_xyxy - corner) * shrunk),
            Annotations((boxes - corner) * shrunk, classes, scores),
            self._index.path(int(batch.indices[image])).name,
        )
