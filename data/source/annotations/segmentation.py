"""COCO segmentations: parts of a polygon, and the box of a mask (polygons or RLE) as pycocotools computes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.annotations.yolo_labels import Corners, Size

_SCALE = 5  # subpixel grid of the outline
_MOST_REACH = 1 << 16  # pixels a point may lie outside its image
_LONGEST_OUTLINE = 1 << 20  # pixels; longer outlines are ignored, as they take seconds
_BASE, _BITS, _MORE, _SIGN = 48, 5, 0x20, 0x10  # compressed counts: 5 bits of a number per character
_MOST_BITS = 64

Runs = Iterable[tuple[int, int]]  # first pixel and end of each run, column-major


def numbers(value: Any) -> list[float] | None:
    """Return a list of finite numbers; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        return None
    try:
        numbers = [float(item) for item in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def polygon_parts(segmentation: Any) -> list[NDArray[np.float64]]:
    """Return the parts (k, 2) of a polygon in pixels; [] for a mask or anything else."""
    parts = [numbers(part) for part in segmentation] if isinstance(segmentation, list) else []
    return [np.array(part).reshape(-1, 2) for part in parts if part and len(part) >= 6 and len(part) % 2 == 0]


def mask_box(segmentation: Any, size_hw: Size) -> Corners | None:
    """Return the corners of the box around a mask's pixels, from polygons or run lengths; None for an empty mask.

    The size of run lengths may differ by one from the image's; they are decoded with their own size.
    """
    if isinstance(segmentation, dict):
        size = numbers(segmentation.get("size")) or []
        if len(size) != 2 or np.abs(np.subtract(size, size_hw)).max() > 1:
            return None
        own_hw = int(size[0]), int(size[1])
        return _around([_runs_of_counts(segmentation.get("counts"), own_hw)], own_hw)
    reach = max(size_hw) + _MOST_REACH
    parts = [part for part in polygon_parts(segmentation) if np.abs(part).max() <= reach and _is_short(part)]
    return _around([_runs_of_polygon(part, size_hw) for part in parts], size_hw)


def _is_short(part: NDArray[np.float64]) -> bool:
    return bool(np.abs(part - np.roll(part, -1, 0)).max(1).sum() <= _LONGEST_OUTLINE)


def _around(masks: Iterable[Runs], size_hw: Size) -> Corners | None:
    height, width = size_hw
    left, top, right, bottom = width, height, 0, 0
    for first, end in (run for runs in masks for run in runs):
        if first == end:
            continue
        columns, rows = (first // height, (end - 1) // height), (first % height, (end - 1) % height)
        low, high = rows if columns[0] == columns[1] else (0, height - 1)
        left, right = min(left, columns[0]), max(right, columns[1] + 1)
        top, bottom = min(top, low), max(bottom, high + 1)
    return (left, top, right, bottom) if right else None


def _runs_of_counts(counts: Any, size_hw: Size) -> Runs:
    """Return the runs of a mask from run lengths, which begin outside it; none if they do not add up to its size."""
    lengths = _decoded(counts) if isinstance(counts, str) else [int(length) for length in numbers(counts) or []]
    if sum(lengths) != math.prod(size_hw) or min(lengths, default=0) < 0:
        return []
    ends = [0, *accumulate(lengths)]
    return list(pairwise(ends))[1::2]


def _decoded(text: str) -> list[int]:
    """Return the run lengths of compressed counts, [] if one is too long; from the fourth on they are differences."""
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


def _runs_of_polygon(points: NDArray[np.float64], size_hw: Size) -> Runs:
    """Return the runs inside a polygon (k, 2): where its outline on the subpixel grid crosses the column centres."""
    height, width = size_hw
    corners = np.trunc(points * _SCALE + 0.5).astype(np.int64)
    outline = np.concatenate([_edge(a, b) for a, b in zip(corners, np.roll(corners, -1, 0), strict=True)])
    before, after = outline[:-1], outline[1:]
    turns = before[:, 0] != after[:, 0]
    columns = (np.minimum(before, after)[turns, 0] + 0.5) / _SCALE - 0.5
    rows = np.ceil(np.clip((np.minimum(before, after)[turns, 1] + 0.5) / _SCALE - 0.5, 0, height))
    inside = (columns == np.floor(columns)) & (columns >= 0) & (columns <= width - 1)
    crossings = np.sort((columns * height + rows)[inside]).astype(np.int64).tolist()
    return zip(crossings[::2], crossings[1::2], strict=False)


def _edge(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the subpixel points (n, 2) of an edge, one per step of its longer axis."""
    reach = np.abs(end - start)
    axis = 0 if reach[0] >= reach[1] else 1
    is_back = start[axis] > end[axis]
    low, high = (end, start) if is_back else (start, end)
    steps = np.arange(reach[axis] + 1)
    line = np.empty((len(steps), 2), np.int64)
    slope = (high[1 - axis] - low[1 - axis]) / reach[axis] if reach[axis] else 0.0
    line[:, axis] = low[axis] + steps
    line[:, 1 - axis] = np.trunc(low[1 - axis] + slope * steps + 0.5)
    return line[::-1] if is_back else line
