"""Geometry of a training sample: `Warp` from a canvas to the sample, and labels warped by it and clipped.

Training images are placed on a canvas (four for mosaic), which is rotated, zoomed, sheared, shifted and flipped into
the sample: canvas.py renders the pixels. Coordinates are continuous: pixel i covers [i, i + 1), with its centre at
i + 0.5. Homogeneous points are rows x, y, 1.

A region is a label of a class below 0 with its box as its polygon. Its visible part is never dropped, however small.

Legend: n objects and regions, k polygon vertices in total.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.utils.types import Sample

HORIZON = 1e-6  # smaller depths lie on or behind the horizon
MIN_SIDE = 2.0  # pixels; a label must be wider and higher
MAX_ASPECT = 100.0
MIN_AREA_LEFT = 0.1  # fraction of an object's area that must stay visible
MIN_AREA_LEFT_OUTLINE = 0.01  # the same for polygons, whose boxes shrink to their visible part


@dataclass(frozen=True)
class Warp:
    """Map from a canvas to a sample: perspective, rotation and zoom, shear, shift, flips, in this order."""

    canvas_hw: tuple[int, int]
    size_hw: tuple[int, int]  # of the sample
    degrees: float = 0.0  # rotation, clockwise as seen
    zoom: float = 1.0  # factor of lengths
    shear_xy: tuple[float, float] = (0.0, 0.0)  # degrees
    perspective_xy: tuple[float, float] = (0.0, 0.0)  # growth of depth per pixel from the canvas's centre
    shift_xy: tuple[float, float] = (0.5, 0.5)  # the canvas's centre, as a fraction of the sample's width and height
    flip_ud: bool = False
    flip_lr: bool = False

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """(3, 3) matrix from homogeneous canvas points to sample points; depth is 1 at the canvas's centre."""
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
        """Whether pixel rows and columns stay rows and columns, so that a resize suffices."""
        return not self.projective and self.matrix[0, 1] == 0 and self.matrix[1, 0] == 0

    def project(self, points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Map canvas points (k, 2) to sample points (k, 2); also return whether each is in front of the horizon, (k,).

        Points on or behind the horizon have no image, and become (0, 0).
        """
        mapped = points @ self.matrix[:2, :2].T + self.matrix[:2, 2]
        if not self.projective:
            return mapped, np.ones(len(points), np.bool_)
        depth = points @ self.matrix[2, :2] + self.matrix[2, 2]
        visible = depth > HORIZON
        mapped[~visible] = 0
        return mapped / np.where(visible, depth, 1)[:, None], visible

    def visible_planes(self) -> NDArray[np.float64]:
        """Return planes (9, 3): a homogeneous canvas point is visible if its products with all rows are ≥ 0.

        There are four sides of the canvas, four of the sample, and the horizon. The sample's sides are straight on the
        canvas too, for any perspective.
        """
        canvas_h, canvas_w = self.canvas_hw
        height, width = self.size_hw
        x, y, depth = self.matrix
        horizon = depth - [0, 0, HORIZON]
        canvas_sides = np.array([[1, 0, 0], [-1, 0, canvas_w], [0, 1, 0], [0, -1, canvas_h]])
        return np.vstack([horizon, canvas_sides, x, width * depth - x, y, height * depth - y])


def append_regions(sample: Sample, regions_xyxy: NDArray[np.float32], classes: NDArray[np.int32]) -> Sample:
    """Append regions, (r, 4), with classes below 0, (r,), to the objects of a sample."""
    outlines = regions_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    return Sample(
        sample.image,
        np.concatenate([sample.boxes_xyxy, regions_xyxy]),
        np.concatenate([sample.classes, classes]),
        [*(sample.segments or [np.zeros((0, 2), np.float32)] * len(sample.classes)), *outlines],
    )


@dataclass(frozen=True)
class CanvasLabels:
    """Labels on a canvas, as flat arrays."""

    boxes_xyxy: NDArray[np.float32]  # (n, 4) canvas pixels, clipped to the canvas
    classes: NDArray[np.int32]  # (n,), below 0 of a region, as in Sample
    points: NDArray[np.float32]  # (k, 2) canvas pixels, the polygons concatenated, not clipped
    counts: NDArray[np.int64]  # (n,), vertices of each object's polygon, 0 = only a box
    weights: NDArray[np.float32]  # (n,), as in Sample

    @classmethod
    def gather(
        cls, samples: Sequence[Sample], corners_xy: Sequence[tuple[int, int]], canvas_hw: tuple[int, int]
    ) -> CanvasLabels:
        """Collect the labels of `samples`, whose images have their top left corners at `corners_xy` of a canvas."""
        boxes, points, counts = [], [np.zeros((0, 2), np.float32)], []
        for sample, corner in zip(samples, corners_xy, strict=True):
            offset = np.array(corner, np.float32)
            boxes.append(sample.boxes_xyxy + np.tile(offset, 2))
            if sample.segments:
                points.append(np.concatenate(sample.segments) + offset)
            counts.append(np.array(list(map(len, sample.segments)) or [0] * len(sample.classes), np.int64))
        return cls(
            clip_boxes(np.concatenate(boxes), canvas_hw),
            np.concatenate([sample.classes for sample in samples]),
            np.concatenate(points),
            np.concatenate(counts),
            np.concatenate([sample.all_weights() for sample in samples]),
        )

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(k,): the object of each vertex, ascending."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def joined(self, other: CanvasLabels) -> CanvasLabels:
        """Return these labels followed by `other`."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return CanvasLabels(*map(np.concatenate, pairs))

    def mirrored(self, rows: NDArray[np.int64], canvas_w: int) -> CanvasLabels:
        """Return the objects `rows`, ascending, mirrored left to right on a canvas `canvas_w` pixels wide."""
        boxes = self.boxes_xyxy[rows]
        boxes[:, [0, 2]] = canvas_w - boxes[:, [2, 0]]
        points = self.points[np.isin(self.owners, rows)]
        points[:, 0] = canvas_w - points[:, 0]
        return CanvasLabels(boxes, self.classes[rows], points, self.counts[rows], self.weights[rows])


def warp_labels(labels: CanvasLabels, warp: Warp) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return boxes (n', 4), classes and weights (n',) of the regions and the objects that are still large enough.

    A box becomes the bounding box of its four mapped corners, clipped to the sample. A polygon becomes the exact
    bounding box of its visible part. Straight edges stay straight, so that its vertices need no resampling.
    """
    before = labels.boxes_xyxy
    after = _warp_boxes(before, warp)
    outlined = labels.counts > 0
    if outlined.any():
        after[outlined] = _warp_outlines(labels, warp)[outlined]
    size_before = (before[:, 2:] - before[:, :2]) * warp.zoom
    size_after = after[:, 2:] - after[:, :2]
    area_left = np.where(outlined, MIN_AREA_LEFT_OUTLINE, MIN_AREA_LEFT) * size_before.prod(1)
    large_enough = (
        (size_after.min(1) > MIN_SIDE)
        & (size_after.max(1) < MAX_ASPECT * size_after.min(1))
        & (size_after.prod(1) > area_left)
    )
    # An object outside of the canvas was clipped to a line, whose rotated box would have an area.
    keep = (size_before.min(1) > 0) & np.where(labels.classes < 0, size_after.min(1) > 0, large_enough)
    return after[keep], labels.classes[keep], labels.weights[keep]


def _warp_boxes(boxes_xyxy: NDArray[np.float32], warp: Warp) -> NDArray[np.float32]:
    """Map boxes (n, 4); a box that reaches the horizon becomes empty."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2).astype(np.float64)
    mapped, visible = warp.project(corners)
    mapped = mapped.reshape(-1, 4, 2)
    boxes = np.concatenate([mapped.min(1), mapped.max(1)], 1)
    boxes[~visible.reshape(-1, 4).all(1)] = 0
    return clip_boxes(boxes.astype(np.float32), warp.size_hw)


def _warp_outlines(labels: CanvasLabels, warp: Warp) -> NDArray[np.float32]:
    """Return the bounding boxes (n, 4) of the visible parts of polygons; empty if nothing is visible."""
    points, owners = clip_polygons(labels.points.astype(np.float64), labels.owners, warp.visible_planes())
    mapped, _ = warp.project(points)
    boxes = np.zeros((len(labels.counts), 4), np.float32)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(starts):
        boxes[owners[starts], :2] = np.minimum.reduceat(mapped, starts)
        boxes[owners[starts], 2:] = np.maximum.reduceat(mapped, starts)
    return clip_boxes(boxes, warp.size_hw)


def clip_boxes(boxes_xyxy: NDArray[Any], size_hw: tuple[int, int]) -> NDArray[Any]:
    """Return boxes (n, 4) clipped to an image of (height, width) pixels."""
    height, width = size_hw
    return np.clip(boxes_xyxy, 0, np.array([width, height, width, height], boxes_xyxy.dtype))


def clip_polygons(
    points: NDArray[np.float64], owners: NDArray[np.int64], planes: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Clip closed polygons to the region where all planes are ≥ 0 (Sutherland and Hodgman, CACM 1974).

    Args:
        points: (k, 2), the polygons concatenated.
        owners: (k,), the polygon of each vertex, ascending; returned likewise.
        planes: (p, 3), half-planes a·x + b·y + c ≥ 0.
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
        fraction = distance[crossing] / (distance[crossing] - distance[following[crossing]])
        slots = np.stack([points, points], 1)  # each vertex, then the crossing of the edge that leaves it
        slots[crossing, 1] += fraction[:, None] * (points[following[crossing]] - points[crossing])
        keep = np.stack([inside, inside != inside[following]], 1).ravel()
        points, owners = slots.reshape(-1, 2)[keep], np.repeat(owners, 2)[keep]
    return points, owners
