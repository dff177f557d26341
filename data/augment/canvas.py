"""Pixels of a training sample: one image or a mosaic of them, cropped and resized, or warped by a `Warp`.

- Zoom, shift and flip only (the default hyperparameters): each image is cropped to its visible part and resized
  directly into the sample, which costs a third of a warp.
- Other warps: the visible part of the canvas is composed by copies, and warped once. Warping the images one by one
  would compute each pixel about 1.5 times, and a warp costs twenty times a copy.

OpenCV's resize maps whole pixels to whole pixels, so that pixels may lie up to half an image pixel beside the exact map
that the labels follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.data.augment.colours import NO_JITTER, Gains, jitter_hsv, jittered_fill
from tessera.data.augment.geometry import HORIZON, CanvasLabels, Warp
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import FILL

_SUBPIXEL_BITS = 4  # fixed-point fraction of the polygon vertices that OpenCV fills


Images = Sequence[NDArray[np.uint8]]
Corners = Sequence[tuple[int, int]]  # left and top of each image on the canvas, which clips it


def render(
    images: Images,
    corners: Corners,
    warp: Warp,
    out: NDArray[np.uint8],
    gains: Gains = NO_JITTER,
    pasted: CanvasLabels | None = None,
) -> None:
    """Render the visible part of a canvas with images, uint8 (H, W, 3), which do not overlap.

    Args:
        out: uint8 (*warp.size_hw, 3), overwritten; pixels of a row must be contiguous.
        gains: HSV jitter of the images.
        pasted: labels whose polygons are filled from the mirrored canvas (copy-paste); None for none.
    """
    assert out.shape == (*warp.size_hw, 3), (out.shape, warp.size_hw)
    if pasted is not None or not warp.axis_aligned:
        image, corner = _compose(images, corners, warp, pasted)
        images, corners = [image], [corner]
    if warp.axis_aligned:
        _resize_images(images, corners, warp, out, gains)
    else:
        _warp_image(images[0], corners[0], warp, out)
        jitter_hsv(out, gains)


def _resize_images(images: Images, corners: Corners, warp: Warp, out: NDArray[np.uint8], gains: Gains) -> None:
    height, width = warp.size_hw
    canvas_h, canvas_w = warp.canvas_hw
    (scale_x, _, shift_x), (_, scale_y, shift_y), _ = warp.matrix.tolist()
    # Flips come last. One flip in place at the end costs next to nothing.
    if warp.flip_lr:
        scale_x, shift_x = -scale_x, width - shift_x
    if warp.flip_ud:
        scale_y, shift_y = -scale_y, height - shift_y
    out.fill(jittered_fill(gains))
    for image, (left, top) in zip(images, corners, strict=True):
        across = _visible_part(left, image.shape[1], canvas_w, scale_x, shift_x, width)
        down = _visible_part(top, image.shape[0], canvas_h, scale_y, shift_y, height)
        if across is None or down is None:
            continue
        seen, target = image[down[0], across[0]], out[down[1], across[1]]
        enlarged = target.size > seen.size  # the jitter is applied where there are fewer pixels
        if enlarged:
            seen = seen.copy()
            jitter_hsv(seen, gains)
        cv2.resize(seen, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)
        if not enlarged:
            jitter_hsv(target, gains)
    if warp.flip_lr or warp.flip_ud:
        cv2.flip(out, -1 if warp.flip_lr and warp.flip_ud else int(warp.flip_lr), dst=out)


def _visible_part(
    start: int, length: int, canvas: int, scale: float, shift: float, size: int
) -> tuple[slice, slice] | None:
    """Return, along one axis, the visible pixels of an image and the sample's pixels they fill; None if none are."""
    low, high = max(start, 0), min(start + length, canvas)
    target_low, target_high = max(round(low * scale + shift), 0), min(round(high * scale + shift), size)
    if target_low >= target_high:
        return None
    seen_low = min(max(round((target_low - shift) / scale), low), high - 1)
    seen_high = min(max(round((target_high - shift) / scale), seen_low + 1), high)
    return slice(seen_low - start, seen_high - start), slice(target_low, target_high)


def _warp_image(image: NDArray[np.uint8], corner: tuple[int, int], warp: Warp, out: NDArray[np.uint8]) -> None:
    if image.size == 0:
        out.fill(FILL)
        return
    # OpenCV's coordinates are 0, 1, 2 … at pixel centres, half a pixel less than those of the matrix.
    to_canvas = np.array([[1, 0, corner[0] + 0.5], [0, 1, corner[1] + 0.5], [0, 0, 1]])
    to_centres = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    matrix = to_centres @ warp.matrix @ to_canvas
    size_wh = warp.size_hw[::-1]
    fill = (FILL, FILL, FILL)
    if warp.projective:
        cv2.warpPerspective(image, matrix, size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)
    else:
        cv2.warpAffine(image, matrix[:2], size_wh, dst=out, flags=cv2.INTER_LINEAR, borderValue=fill)


def _compose(
    images: Images, corners: Corners, warp: Warp, pasted: CanvasLabels | None
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Compose the visible part of the canvas, with pasted objects, as one image; also return its corner."""
    canvas_w = warp.canvas_hw[1]
    left, top, right, bottom = _visible_canvas(warp)
    if pasted is not None:  # pasted objects come from the mirrored position
        left, right = min(left, canvas_w - right), max(right, canvas_w - left)
    canvas = np.full((max(bottom - top, 0), max(right - left, 0), 3), FILL, np.uint8)
    for image, (image_left, image_top) in zip(images, corners, strict=True):
        x0, x1 = max(image_left, left), min(image_left + image.shape[1], right)
        y0, y1 = max(image_top, top), min(image_top + image.shape[0], bottom)
        if x0 < x1 and y0 < y1:
            seen = image[y0 - image_top : y1 - image_top, x0 - image_left : x1 - image_left]
            canvas[y0 - top : y1 - top, x0 - left : x1 - left] = seen
    if pasted is not None and canvas.size:
        mask = np.zeros(canvas.shape[:2], np.uint8)
        # OpenCV fills several polygons by parity, with holes where two overlap: one call each.
        origin, unit = np.array([left, top]) + 0.5, 2**_SUBPIXEL_BITS
        for outline in np.split(pasted.points, np.cumsum(pasted.counts)[:-1]):
            cv2.fillPoly(mask, [np.rint((outline - origin) * unit).astype(np.int32)], 255, shift=_SUBPIXEL_BITS)
        cv2.copyTo(cv2.flip(canvas, 1), mask, canvas)
    return canvas, (left, top)


def _visible_canvas(warp: Warp) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of the visible part of the canvas, with a margin for interpolation."""
    canvas_h, canvas_w = warp.canvas_hw
    height, width = warp.size_hw
    corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], np.float64)
    x, y, depth = np.linalg.inv(warp.matrix) @ corners.T
    if depth.min() < HORIZON:  # the horizon is visible, and with it any part of the canvas
        return 0, 0, canvas_w, canvas_h
    limits = np.array([canvas_w, canvas_h])
    points = np.stack([x, y], 1) / depth[:, None]
    left, top = np.clip(np.floor(points.min(0)) - 2, 0, limits).astype(int).tolist()
    right, bottom = np.clip(np.ceil(points.max(0)) + 2, 0, limits).astype(int).tolist()
    return left, top, right, bottom
