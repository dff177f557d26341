"""The segmentation of a COCO annotation: its polygon, and the box around a polygon or a mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.annotations.labels import Size

_BASE, _BITS, _MORE, _SIGN = 48, 5, 0x20, 0x10  # compressed counts: text of 6 bits a character, 5 of them of a number
_MOST_BITS = 64

Corners = tuple[float, float, float, float]


def numbers(value: Any) -> list[float] | None:
    """A list of finite numbers, None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        return None
    try:
        numbers = [float(item) for item in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def polygon_parts(segmentation: Any) -> list[NDArray[np.float64]]:
    """The parts (k, 2) of a polygon, xy pixels; [] for a mask, or anything else."""
    parts = [numbers(part) for part in segmentation] if isinstance(segmentation, list) else []
    return [np.array(part).reshape(-1, 2) for part in parts if part and len(part) >= 6 and len(part) % 2 == 0]


def mask_box(segmentation: Any, size_hw: Size) -> Corners | None:
    """Corners in pixels of the box around the points of polygons, or the pixels of run lengths; None without any.

    Run lengths may be of a size that is off by one from the image's: they are decoded by their own.
    """
    if not isinstance(segmentation, dict):
        points = np.concatenate([np.zeros((0, 2)), *polygon_parts(segmentation)])
        if not len(points) or (points.min(0) == points.max(0)).any():
            return None
        (left, top), (right, bottom) = points.min(0).tolist(), points.max(0).tolist()
        return left, top, right, bottom
    size = numbers(segmentation.get("size")) or []
    if len(size) != 2 or np.abs(np.subtract(size, size_hw)).max() > 1:
        return None
    height, width = int(size[0]), int(size[1])
    counts = segmentation.get("counts")
    lengths = _decoded(counts) if isinstance(counts, str) else [int(length) for length in numbers(counts) or []]
    if sum(lengths) != height * width or min(lengths, default=0) < 0:
        return None
    # Column by column; every second run, from the first on, is outside the mask.
    mask = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(width, height)
    columns, rows = (np.flatnonzero(mask.any(axis)).tolist() for axis in (1, 0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if columns else None


def _decoded(text: str) -> list[int]:
    """The run lengths in compressed counts: each but the first three as the difference to the one before the last.

    [] where one has more bits than any run length.
    """
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - _BASE
        value |= (code & (_MORE - 1)) << shift
        shift += _BITS
        if shift > _MOST_BITS:
            return []
        if not code & _MORE:
            value -= (1 << shift) if code & _SIGN else 0
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    return lengths
