"""Oracle of augmentation: the whole canvas, one object at a time, one step after the other.

Slow and obvious on purpose. It shares the `Scene` with the product, but no geometry. Points go through the steps of the
rule one by one, pixels through one warp of the full canvas, flips through `np.flip`.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from matplotlib.path import Path as Outline

from tessera.data.augment.geometry import Warp
from tessera.data.augment.pipeline import Scene
from tessera.utils.types import Sample


def forward(warp: Warp, x: float, y: float, mirrored: bool = True) -> tuple[float, float] | None:
    """Where a canvas point comes to lie in the sample; None behind the horizon."""
    x, y = x - warp.canvas_hw[1] / 2, y - warp.canvas_hw[0] / 2
    depth = 1 + warp.perspective_xy[0] * x + warp.perspective_xy[1] * y
    if depth <= 1e-6:
        return None
    x, y = x / depth, y / depth
    angle = math.radians(warp.degrees)
    x, y = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    x, y = x * warp.zoom, y * warp.zoom
    x, y = x + math.tan(math.radians(warp.shear_xy[0])) * y, y + math.tan(math.radians(warp.shear_xy[1])) * x
    height, width = warp.size_hw
    x, y = x + warp.shift_xy[0] * width, y + warp.shift_xy[1] * height
    if mirrored and warp.flip_lr:
        x = width - x
    if mirrored and warp.flip_ud:
        y = height - y
    return x, y


def homography(warp: Warp) -> np.ndarray:
    """Canvas to unmirrored sample, fitted to five mapped points around the canvas's centre."""
    rows = []
    for dx, dy in ((0, 0), (9, 0), (0, 9), (-9, 0), (0, -9), (9, 9)):
        x, y = warp.canvas_hw[1] / 2 + dx, warp.canvas_hw[0] / 2 + dy
        mapped = forward(warp, x, y, mirrored=False)
        assert mapped is not None
        rows.append([x, y, 1, 0, 0, 0, -mapped[0] * x, -mapped[0] * y, -mapped[0]])
        rows.append([0, 0, 0, x, y, 1, -mapped[1] * x, -mapped[1] * y, -mapped[1]])
    scale = np.array([100.0, 100, 1, 100, 100, 1, 1e4, 1e4, 100])  # conditions the fit
    matrix = (np.linalg.svd(np.array(rows) / scale)[2][-1] / scale).reshape(3, 3)
    return matrix / (matrix[2] @ [warp.canvas_hw[1] / 2, warp.canvas_hw[0] / 2, 1])


def plain_scene(
    scene: Scene, samples: list[Sample], copy_paste: float = 0.0, rng: np.random.Generator | None = None
) -> tuple[Sample, np.ndarray]:
    """What `render_scene` should return, images within interpolation; and the canvas."""
    warp = scene.warp
    canvas_h, canvas_w = warp.canvas_hw
    canvas = np.full((canvas_h, canvas_w, 3), 114, np.uint8)
    boxes, classes, outlines = [], [], []
    for corner, sample in enumerate(samples):
        tile_h, tile_w = sample.image.shape[:2]
        if len(samples) == 1:
            left, top = (canvas_w - tile_w) // 2, (canvas_h - tile_h) // 2
        else:
            left = scene.centre_xy[0] - (tile_w if corner in (0, 2) else 0)
            top = scene.centre_xy[1] - (tile_h if corner in (0, 1) else 0)
        for y in range(max(top, 0), min(top + tile_h, canvas_h)):
            x0, x1 = max(left, 0), min(left + tile_w, canvas_w)
            if x0 < x1:
                canvas[y, x0:x1] = sample.image[y - top, x0 - left : x1 - left]
        for i, (x0, y0, x1, y1) in enumerate(sample.boxes_xyxy.tolist()):
            clip_x, clip_y = (lambda v: min(max(v, 0), canvas_w)), (lambda v: min(max(v, 0), canvas_h))
            boxes.append([clip_x(x0 + left), clip_y(y0 + top), clip_x(x1 + left), clip_y(y1 + top)])
            classes.append(int(sample.classes[i]))
            outlines.append(sample.segments[i] + [left, top] if sample.segments else np.zeros((0, 2)))
    if copy_paste:
        assert rng is not None
        canvas = _paste(canvas, boxes, classes, outlines, copy_paste, rng)
    boxes, classes = _labels(boxes, classes, outlines, warp)
    return Sample(plain_image(canvas, warp), boxes, classes), canvas


def _paste(canvas, boxes, classes, outlines, probability, rng):  # type: ignore[no-untyped-def]
    """Extend the lists by the pasted objects and return the canvas with them."""
    width = canvas.shape[1]
    result, source = canvas.copy(), np.fliplr(canvas)
    for i in np.flatnonzero(rng.random(len(boxes)) < probability):
        x0, y0, x1, y1 = boxes[i]
        if len(outlines[i]) == 0 or x1 <= x0 or y1 <= y0:
            continue
        box = [width - x1, y0, width - x0, y1]
        covers = []
        for other in boxes:
            across = max(min(box[2], other[2]) - max(box[0], other[0]), 0)
            down = max(min(box[3], other[3]) - max(box[1], other[1]), 0)
            area = (other[2] - other[0]) * (other[3] - other[1])
            covers.append(across * down / area if area > 0 else 0)
        if max(covers) >= 0.3:
            continue
        outline = np.stack([width - outlines[i][:, 0], outlines[i][:, 1]], 1)
        mask = np.zeros(canvas.shape[:2], np.uint8)
        cv2.drawContours(mask, [outline.astype(np.int32)], -1, 1, cv2.FILLED)
        result[mask > 0] = source[mask > 0]
        boxes.append(box)
        classes.append(classes[i])
        outlines.append(outline)
    return result


def plain_image(canvas: np.ndarray, warp: Warp, margin: int = 0, flags: int = cv2.INTER_LINEAR) -> np.ndarray:
    """The whole canvas, which has `margin` more pixels on every side, through one warp."""
    height, width = warp.size_hw
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    inner = np.array([[1, 0, -margin], [0, 1, -margin], [0, 0, 1]])
    matrix = np.linalg.inv(half) @ homography(warp) @ inner @ half
    image = cv2.warpPerspective(canvas, matrix, (width, height), flags=flags, borderValue=(114, 114, 114))
    if warp.flip_ud:
        image = np.flip(image, 0)
    if warp.flip_lr:
        image = np.flip(image, 1)
    return np.ascontiguousarray(image)


def _labels(boxes, classes, outlines, warp):  # type: ignore[no-untyped-def]
    kept_boxes, kept_classes = [], []
    for (x0, y0, x1, y1), label, outline in zip(boxes, classes, outlines, strict=True):
        if len(outline):
            box, limit = _outline_box(outline, warp), 0.01
        else:
            box, limit = _corner_box(x0, y0, x1, y1, warp), 0.1
        if box is None:
            continue
        w, h = box[2] - box[0], box[3] - box[1]
        area = (x1 - x0) * (y1 - y0) * warp.zoom**2
        if w > 2 and h > 2 and max(w / h, h / w) < 100 and area > 0 and w * h / area > limit:
            kept_boxes.append(box)
            kept_classes.append(label)
    return np.array(kept_boxes).reshape(-1, 4), np.array(kept_classes, np.int32)


def _corner_box(x0, y0, x1, y1, warp):  # type: ignore[no-untyped-def]
    corners = [forward(warp, x, y) for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))]
    if any(corner is None for corner in corners):
        return None
    height, width = warp.size_hw
    xs = [min(max(x, 0), width) for x, _ in corners]
    ys = [min(max(y, 0), height) for _, y in corners]
    return [min(xs), min(ys), max(xs), max(ys)]


def _outline_box(outline, warp):  # type: ignore[no-untyped-def]
    """By brute force: which points of a fine grid over the sample lie inside the polygon and the canvas.

    Many points of its edges besides, as a sharp tip may fall between the points of the grid.
    """
    height, width = warp.size_hw
    step = 0.25
    y, x = np.mgrid[step / 2 : height : step, step / 2 : width : step]
    grid = np.stack([x.ravel(), y.ravel()], 1)
    unmirrored = np.stack(
        [
            width - grid[:, 0] if warp.flip_lr else grid[:, 0],
            height - grid[:, 1] if warp.flip_ud else grid[:, 1],
            np.ones(len(grid)),
        ]
    )
    source = np.linalg.inv(homography(warp)) @ unmirrored
    front = source[2] > 0
    source = (source[:2] / source[2]).T
    canvas = np.array(warp.canvas_hw[::-1])
    seen = front & (source >= 0).all(1) & (source <= canvas).all(1) & Outline(outline).contains_points(source)
    fraction = np.linspace(0, 1, 100)[:, None, None]
    edges = (outline + fraction * (np.roll(outline, -1, 0) - outline)).reshape(-1, 2)
    edges = edges[((edges >= 0) & (edges <= canvas)).all(1)]
    mapped = np.array([point for point in (forward(warp, x, y) for x, y in edges) if point]).reshape(-1, 2)
    mapped = mapped[((mapped >= 0) & (mapped <= [width, height])).all(1)]
    found = np.concatenate([grid[seen], mapped])
    return [*found.min(0), *found.max(0)] if len(found) else None
