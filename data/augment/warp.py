"""Pictures and their objects, laid on a canvas and brought into a sample by one map.

Training pictures are laid on a canvas (four of them for mosaic) which a `Warp` then turns, zooms, shears, shifts and
mirrors into the sample. Building that canvas and warping it would touch each pixel several times; `render` gives the
same result in one pass where it can:

- zoom, shift and mirror only (the default hyperparameters): every picture is cropped to what will be seen of it and
  resized straight into its place in the sample, which costs a third of a warp;
- anything else: only the part of the canvas that will be seen is laid out, by plain copies, and warped once. Warping
  the pictures one by one instead would compute each pixel about one and a half times, as their bounding rectangles
  overlap, and a warp costs twenty times a copy.

Coordinates are continuous: pixel i covers [i, i + 1) and its centre is i + 0.5. Labels follow the exact map. OpenCV's
resize maps whole pixels on whole pixels, so that pixels may lie up to half a pixel of the picture beside it.

Legend: n objects, k polygon vertices of all objects together. Homogeneous points are rows x, y, 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.augment.colours import NO_JITTER, Colours
from utils.boxes import clip_boxes
from utils.types import FILL, Sample

MIN_SIDE = 2.0  # pixels: a label must be wider and higher than this
MAX_ASPECT = 100.0
MIN_AREA_LEFT = 0.1  # share of an object's area that must stay in sight
MIN_AREA_LEFT_OUTLINE = 0.01  # the same for polygons, whose boxes shrink to what is really in sight

_HORIZON = 1e-6  # depths below this lie on or behind the horizon of a perspective
_SUBPIXEL_BITS = 4  # fixed-point fraction of the polygon vertices that OpenCV fills


@dataclass(frozen=True)
class Warp:
    """A map from a canvas to a sample: perspective, rotation with zoom, and shear about the canvas's centre, then a
    shift, then mirrors.

    Attributes:
        canvas_hw, size_hw: height and width of canvas and sample in pixels.
        degrees: rotation, clockwise as seen.
        zoom: factor of lengths.
        shear_xy: angles in degrees.
        perspective_xy: growth of depth per pixel from the canvas's centre.
        shift_xy: where the canvas's centre comes to lie, as a share of the sample's width and height.
        flip_ud, flip_lr: mirror the sample upside down, left to right.
    """

    canvas_hw: tuple[int, int]
    size_hw: tuple[int, int]
    degrees: float = 0.0
    zoom: float = 1.0
    shear_xy: tuple[float, float] = (0.0, 0.0)
    perspective_xy: tuple[float, float] = (0.0, 0.0)
    shift_xy: tuple[float, float] = (0.5, 0.5)
    flip_ud: bool = False
    flip_lr: bool = False

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """(3, 3): homogeneous canvas points to sample points; depth is 1 at the canvas's centre."""
        canvas_h, canvas_w = self.canvas_hw
        height, width = self.size_hw
        angle = math.radians(self.degrees)
        cos, sin = self.zoom * math.cos(angle), self.zoom * math.sin(angle)
        shear_x, shear_y = (math.tan(math.radians(shear)) for shear in self.shear_xy)
        centre = np.array([[1, 0, -canvas_w / 2], [0, 1, -canvas_h / 2], [0, 0, 1]])
        perspective = np.array([[1, 0, 0], [0, 1, 0], [*self.perspective_xy, 1]])
        rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        shear = np.array([[1, shear_x, 0], [shear_y, 1, 0], [0, 0, 1]])
        shift = np.array([[1, 0, self.shift_xy[0] * width], [0, 1, self.shift_xy[1] * height], [0, 0, 1]])
        mirror = np.eye(3)
        if self.flip_lr:
            mirror[0] = -1, 0, width
        if self.flip_ud:
            mirror[1] = 0, -1, height
        return mirror @ shift @ shear @ rotation @ perspective @ centre

    @property
    def projective(self) -> bool:
        """Whether depth varies."""
        return self.perspective_xy != (0.0, 0.0)

    @property
    def axis_aligned(self) -> bool:
        """Whether pixel rows and columns stay rows and columns, so that a resize does."""
        return not self.projective and self.matrix[0, 1] == 0 and self.matrix[1, 0] == 0

    def project(self, points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Map canvas points (k, 2) to sample points (k, 2), and tell which lie before the horizon (k,).

        Points on or behind the horizon have no image: theirs is (0, 0).
        """
        mapped = points @ self.matrix[:2, :2].T + self.matrix[:2, 2]
        if not self.projective:
            return mapped, np.ones(len(points), np.bool_)
        depth = points @ self.matrix[2, :2] + self.matrix[2, 2]
        visible = depth > _HORIZON
        mapped[~visible] = 0
        return mapped / np.where(visible, depth, 1)[:, None], visible

    def sight_planes(self) -> NDArray[np.float64]:
        """(9, 3): a homogeneous canvas point is in sight where its products with all rows are ≥ 0.

        Four sides of the canvas, four of the sample, one for the horizon. The sample's sides are straight on the
        canvas too, in homogeneous coordinates, whatever the perspective.
        """
        canvas_h, canvas_w = self.canvas_hw
        height, width = self.size_hw
        x, y, depth = self.matrix
        horizon = depth - [0, 0, _HORIZON]
        canvas_sides = np.array([[1, 0, 0], [-1, 0, canvas_w], [0, 1, 0], [0, -1, canvas_h]])
        return np.vstack([horizon, canvas_sides, x, width * depth - x, y, height * depth - y])


Part = tuple[slice, slice]  # rows and columns of a picture


class Tile(NamedTuple):
    """A picture on a canvas.

    Attributes:
        image: uint8 (H, W, 3).
        left, top: where its corner lies on the canvas, in whole pixels; outside is cut away.
    """

    image: NDArray[np.uint8]
    left: int
    top: int


@dataclass(frozen=True)
class Objects:
    """Labels on a canvas, flat.

    Attributes:
        boxes_xyxy: float32 (n, 4) canvas pixels, cut to the canvas.
        classes: int32 (n,).
        points: float32 (k, 2) canvas pixels, the polygons end to end, not cut.
        counts: int64 (n,), vertices of each object's polygon, 0 where it has only a box.
    """

    boxes_xyxy: NDArray[np.float32]
    classes: NDArray[np.int32]
    points: NDArray[np.float32]
    counts: NDArray[np.int64]

    @classmethod
    def gather(cls, samples: Sequence[Sample], tiles: Sequence[Tile], canvas_hw: tuple[int, int]) -> Objects:
        """Labels of `samples`, whose pictures lie on a canvas as `tiles` say."""
        offsets = [np.array([tile.left, tile.top], np.float32) for tile in tiles]
        boxes = [sample.boxes_xyxy + np.tile(offset, 2) for sample, offset in zip(samples, offsets, strict=True)]
        points = [
            np.concatenate(sample.segments) + offset
            for sample, offset in zip(samples, offsets, strict=True)
            if sample.segments
        ]
        counts = [
            np.fromiter(map(len, sample.segments), np.int64, len(sample.classes))
            if sample.segments
            else np.zeros(len(sample.classes), np.int64)
            for sample in samples
        ]
        return cls(
            clip_boxes(np.concatenate(boxes), canvas_hw),
            np.concatenate([sample.classes for sample in samples]),
            np.concatenate([np.zeros((0, 2), np.float32), *points]),
            np.concatenate(counts),
        )

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(k,): the object of each vertex, ascending."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def joined(self, other: Objects) -> Objects:
        """These objects and then `other`."""
        return Objects(
            np.concatenate([self.boxes_xyxy, other.boxes_xyxy]),
            np.concatenate([self.classes, other.classes]),
            np.concatenate([self.points, other.points]),
            np.concatenate([self.counts, other.counts]),
        )

    def mirrored(self, rows: NDArray[np.int64], canvas_w: int) -> Objects:
        """Objects `rows`, ascending, mirrored left to right about the middle of a canvas `canvas_w` pixels wide."""
        boxes = self.boxes_xyxy[rows]
        boxes[:, [0, 2]] = canvas_w - boxes[:, [2, 0]]
        points = self.points[np.isin(self.owners, rows)]
        points[:, 0] = canvas_w - points[:, 0]
        return Objects(boxes, self.classes[rows], points, self.counts[rows])


def warp_objects(objects: Objects, warp: Warp) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Labels in the sample: boxes (n', 4) and classes (n',) of the objects that are still worth one.

    A box becomes the bounding box of its four mapped corners, cut to the sample. A polygon becomes the bounding box of
    what is in sight of it, exactly: straight edges stay straight, so its vertices need no resampling.
    """
    before = objects.boxes_xyxy
    after = _warp_boxes(before, warp)
    outlined = objects.counts > 0
    if outlined.any():
        after[outlined] = _warp_outlines(objects, warp)[outlined]
    size_before = (before[:, 2:] - before[:, :2]) * warp.zoom
    size_after = after[:, 2:] - after[:, :2]
    area_left = np.where(outlined, MIN_AREA_LEFT_OUTLINE, MIN_AREA_LEFT) * size_before.prod(1)
    kept = (
        (size_before.min(1) > 0)  # what the canvas cut away altogether would come back as the box of a turned line
        & (size_after.min(1) > MIN_SIDE)
        & (size_after.max(1) < MAX_ASPECT * size_after.min(1))
        & (size_after.prod(1) > area_left)
    )
    return after[kept], objects.classes[kept]


def _warp_boxes(boxes_xyxy: NDArray[np.float32], warp: Warp) -> NDArray[np.float32]:
    """(n, 4) to (n, 4); empty where the box reaches the horizon."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2).astype(np.float64)
    mapped, visible = warp.project(corners)
    mapped = mapped.reshape(-1, 4, 2)
    boxes = np.concatenate([mapped.min(1), mapped.max(1)], 1)
    boxes[~visible.reshape(-1, 4).all(1)] = 0
    return clip_boxes(boxes.astype(np.float32), warp.size_hw)


def _warp_outlines(objects: Objects, warp: Warp) -> NDArray[np.float32]:
    """(n, 4): bounding boxes of what is in sight of each polygon; empty where nothing is."""
    points, owners = clip_outlines(objects.points.astype(np.float64), objects.owners, warp.sight_planes())
    mapped, _ = warp.project(points)
    boxes = np.zeros((len(objects.counts), 4), np.float32)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(starts):
        boxes[owners[starts], :2] = np.minimum.reduceat(mapped, starts)
        boxes[owners[starts], 2:] = np.maximum.reduceat(mapped, starts)
    return clip_boxes(boxes, warp.size_hw)


def clip_outlines(
    points: NDArray[np.float64], owners: NDArray[np.int64], planes: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Cut closed polygons to the region where all planes are ≥ 0 (Sutherland and Hodgman, CACM 1974), all at once.

    Args:
        points: (k, 2), the polygons end to end.
        owners: (k,), the polygon of each vertex, ascending.
        planes: (p, 3), half-planes a·x + b·y + c ≥ 0.

    Returns:
        points and owners of what is left; a polygon out of sight has no vertex.
    """
    for *normal, constant in planes:
        distance = points @ np.array(normal) + constant
        inside = distance >= 0
        if inside.all():
            continue
        first = np.diff(owners, prepend=-1) != 0
        following = np.arange(1, len(points) + 1)
        following[np.roll(first, -1)] = np.flatnonzero(first)  # the vertex after a polygon's last is its first
        crossing = np.flatnonzero(inside != inside[following])
        share = distance[crossing] / (distance[crossing] - distance[following[crossing]])
        slots = np.stack([points, points], 1)  # each vertex, then where the edge that leaves it crosses
        slots[crossing, 1] += share[:, None] * (points[following[crossing]] - points[crossing])
        kept = np.stack([inside, inside != inside[following]], 1).ravel()
        points, owners = slots.reshape(-1, 2)[kept], np.repeat(owners, 2)[kept]
    return points, owners


def render(
    tiles: Sequence[Tile],
    warp: Warp,
    out: NDArray[np.uint8],
    colours: Colours = NO_JITTER,
    pasted: Objects | None = None,
) -> None:
    """Draw what the sample shows of a canvas with `tiles`.

    Args:
        tiles: pictures on the canvas; they do not overlap.
        warp: canvas to sample.
        out: uint8 (*warp.size_hw, 3), overwritten; a view whose pixels are contiguous in a row.
        colours: what becomes of them.
        pasted: objects whose polygons are filled from the mirrored canvas, as copy-paste does; None for none.
    """
    assert out.shape == (*warp.size_hw, 3), (out.shape, warp.size_hw)
    if pasted is not None or not warp.axis_aligned:
        tiles = [_lay_out(tiles, warp, pasted)]
    if warp.axis_aligned:
        _resize_tiles(tiles, warp, out, colours)
    else:
        _warp_tile(tiles[0], warp, out)
        colours(out)


def _resize_tiles(tiles: Sequence[Tile], warp: Warp, out: NDArray[np.uint8], colours: Colours) -> None:
    height, width = warp.size_hw
    canvas_h, canvas_w = warp.canvas_hw
    (scale_x, _, shift_x), (_, scale_y, shift_y), _ = warp.matrix.tolist()
    # Mirrors come last, so without them the sample is the same one, mirrored; one flip in place costs next to nothing.
    if warp.flip_lr:
        scale_x, shift_x = -scale_x, width - shift_x
    if warp.flip_ud:
        scale_y, shift_y = -scale_y, height - shift_y
    parts = []
    for image, left, top in tiles:
        across = _seen_part(left, image.shape[1], canvas_w, scale_x, shift_x, width)
        down = _seen_part(top, image.shape[0], canvas_h, scale_y, shift_y, height)
        if across is None or down is None:
            continue
        seen, target = image[down[0], across[0]], out[down[1], across[1]]
        enlarged = target.size > seen.size  # colours are changed where there are fewer pixels
        if enlarged:
            seen = seen.copy()
            colours(seen)
        cv2.resize(seen, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)
        if not enlarged:
            colours(target)
        parts.append((down[1], across[1]))
    for gap in gaps(parts, warp.size_hw):
        out[gap] = colours.grey
    if warp.flip_lr or warp.flip_ud:
        cv2.flip(out, -1 if warp.flip_lr and warp.flip_ud else int(warp.flip_lr), dst=out)


def gaps(parts: Sequence[Part], size_hw: tuple[int, int]) -> list[Part]:
    """The rest of a picture of `size_hw`, in parts, where `parts` do not overlap."""
    height, width = size_hw
    boxes = [(*rows.indices(height)[:2], *columns.indices(width)[:2]) for rows, columns in parts]
    edges = sorted({0, height, *(edge for box in boxes for edge in box[:2])})
    found = []
    for top, bottom in pairwise(edges):
        at = 0
        for left, right in sorted((box[2], box[3]) for box in boxes if box[0] <= top and bottom <= box[1]):
            if at < left:
                found.append((slice(top, bottom), slice(at, left)))
            at = right
        if at < width:
            found.append((slice(top, bottom), slice(at, width)))
    return found


def _seen_part(
    start: int, length: int, canvas: int, scale: float, shift: float, size: int
) -> tuple[slice, slice] | None:
    """Along one axis, which pixels of a tile are seen and which pixels of the sample they fill; None where none is."""
    low, high = max(start, 0), min(start + length, canvas)
    target_low, target_high = max(round(low * scale + shift), 0), min(round(high * scale + shift), size)
    if target_low >= target_high:
        return None
    seen_low = min(max(round((target_low - shift) / scale), low), high - 1)
    seen_high = min(max(round((target_high - shift) / scale), seen_low + 1), high)
    return slice(seen_low - start, seen_high - start), slice(target_low, target_high)


def _warp_tile(tile: Tile, warp: Warp, out: NDArray[np.uint8]) -> None:
    if tile.image.size == 0:
        out.fill(FILL)
        return
    # OpenCV numbers pixel centres 0, 1, 2 …, the matrix maps edges: centres lie half a pixel further.
    to_canvas = np.array([[1, 0, tile.left + 0.5], [0, 1, tile.top + 0.5], [0, 0, 1]])
    to_centres = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    matrix = to_centres @ warp.matrix @ to_canvas
    size_wh = warp.size_hw[::-1]
    fill = (FILL, FILL, FILL)
    if warp.projective:
        cv2.warpPerspective(tile.image, matrix, size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)
    else:
        cv2.warpAffine(tile.image, matrix[:2], size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)


def _lay_out(tiles: Sequence[Tile], warp: Warp, pasted: Objects | None) -> Tile:
    """The part of the canvas that the sample shows, with objects pasted, as one tile."""
    canvas_w = warp.canvas_hw[1]
    left, top, right, bottom = _window(warp)
    if pasted is not None:  # what is pasted comes from the mirrored place, so that one is needed as well
        left, right = min(left, canvas_w - right), max(right, canvas_w - left)
    canvas = np.full((max(bottom - top, 0), max(right - left, 0), 3), FILL, np.uint8)
    for image, tile_left, tile_top in tiles:
        x0, x1 = max(tile_left, left), min(tile_left + image.shape[1], right)
        y0, y1 = max(tile_top, top), min(tile_top + image.shape[0], bottom)
        if x0 < x1 and y0 < y1:
            seen = image[y0 - tile_top : y1 - tile_top, x0 - tile_left : x1 - tile_left]
            canvas[y0 - top : y1 - top, x0 - left : x1 - left] = seen
    if pasted is not None and canvas.size:
        mask = np.zeros(canvas.shape[:2], np.uint8)
        # OpenCV fills several polygons by parity, which would punch a hole where two overlap: one call each.
        origin, unit = np.array([left, top]) + 0.5, 2**_SUBPIXEL_BITS
        for outline in np.split(pasted.points, np.cumsum(pasted.counts)[:-1]):
            cv2.fillPoly(mask, [np.rint((outline - origin) * unit).astype(np.int32)], 255, shift=_SUBPIXEL_BITS)
        cv2.copyTo(cv2.flip(canvas, 1), mask, canvas)
    return Tile(canvas, left, top)


def _window(warp: Warp) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the part of the canvas that the sample shows, with a margin for interpolation."""
    canvas_h, canvas_w = warp.canvas_hw
    height, width = warp.size_hw
    corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], np.float64)
    x, y, depth = np.linalg.inv(warp.matrix) @ corners.T
    if depth.min() < _HORIZON:  # the horizon runs through the sample, which may show anything
        return 0, 0, canvas_w, canvas_h
    limits = np.array([canvas_w, canvas_h])
    points = np.stack([x, y], 1) / depth[:, None]
    left, top = np.clip(np.floor(points.min(0)) - 2, 0, limits).astype(int).tolist()
    right, bottom = np.clip(np.ceil(points.max(0)) + 2, 0, limits).astype(int).tolist()
    return left, top, right, bottom
