"""Merging of the detections of overlapping tiles, so that each object is detected once.

Two detections of one class from different tiles are one object where, clipped to the overlap of both tiles, their IoU
exceeds the NMS threshold. Where one of them touches a seam (a side of its tile inside the image), the intersection over
the smaller box counts instead, since a tile may show a part of an object only. The best pairs are merged first, and a
tile contributes at most one detection to an object.

Of the detections of an object, the best one that touches no seam stays; where all touch one, the box around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.data.feed.image_sizes import Tile
from tessera.models.nms import NmsSettings, nms_of_candidates
from tessera.utils.types import Detections

_EDGE, _LEAST_EDGE = 0.01, 2.0  # a box this near to a seam touches it: fraction of the tile, pixels
_MOST_IOU = 0.5  # for networks without NMS
_SMALLER = 0.5  # intersection over the smaller box of one object at a seam
_LEAST_SEEN = 0.1  # visible fraction of a box in the overlap; less may be a neighbouring object

Boxes = NDArray[np.float32]


def join(
    tiles: Sequence[Tile], parts: Sequence[Detections], size_hw: tuple[int, int], rules: NmsSettings
) -> Detections:
    """Return one detection per object, descending by score, by the `iou`, `agnostic` and `max_det` of `rules`.

    `parts` are the detections of each tile on the host, in pixels of the image. The whole image may be a tile.
    """
    counts = [len(part) for part in parts]
    starts = np.cumsum([0, *counts])
    tile_of = np.repeat(np.arange(len(tiles)), counts)
    boxes = torch.cat([part.boxes_xyxy for part in parts]).numpy().astype(np.float32)
    scores = torch.cat([part.scores for part in parts]).numpy()
    classes = torch.cat([part.classes for part in parts]).numpy()
    touches = np.concatenate(
        [_touches(boxes[starts[i] : starts[i + 1]], view, size_hw) for i, view in enumerate(tiles)]
    )
    pairs: list[tuple[float, int, int]] = []
    for i, j in combinations(range(len(tiles)), 2):
        view = _common(tiles[i], tiles[j])
        first, second = np.arange(starts[i], starts[i + 1]), np.arange(starts[j], starts[j + 1])
        if view is not None and len(first) and len(second):
            same = np.ones((len(first), len(second)), bool)
            if not rules.agnostic:
                same = classes[first][:, None] == classes[second][None]
            near = touches[first][:, None] | touches[second][None]
            agreement = _agreement(boxes[first], boxes[second], view, near, min(rules.iou, _MOST_IOU))
            a, b = np.nonzero(same & (agreement > 0))
            pairs += zip(agreement[a, b].tolist(), first[a].tolist(), second[b].tolist(), strict=True)
    groups = _groups(len(boxes), sorted(pairs, key=lambda pair: -pair[0]), tile_of)
    rows = [_one(boxes[group], scores[group], classes[group], touches[group]) for group in groups]
    table = torch.tensor(np.array(rows, np.float32).reshape(-1, 6))
    return nms_of_candidates(table[table[:, 4].argsort(descending=True, stable=True)], rules)


def _touches(boxes: Boxes, tile: Tile, size_hw: tuple[int, int]) -> NDArray[np.bool_]:
    """Return whether boxes (n, 4) end at a seam of their tile."""
    edge = max(_LEAST_EDGE, _EDGE * max(tile.right - tile.left, tile.bottom - tile.top))
    inner = np.array([tile.left > 0, tile.top > 0, tile.right < size_hw[1], tile.bottom < size_hw[0]])
    found: NDArray[np.bool_] = ((np.abs(boxes - np.array(tile)) < edge) & inner).any(1)
    return found


def _common(a: Tile, b: Tile) -> Tile | None:
    """Return the overlap of two tiles; None where there is none."""
    view = Tile(max(a.left, b.left), max(a.top, b.top), min(a.right, b.right), min(a.bottom, b.bottom))
    return view if view.left < view.right and view.top < view.bottom else None


def _agreement(a: Boxes, b: Boxes, view: Tile, near: NDArray[np.bool_], iou: float) -> NDArray[np.float64]:
    """Return the IoU in `view` of boxes (n, 4) and (m, 4) that may be one object; 0 for other pairs.

    `near` (n, m): whether one of the two touches a seam.
    """
    parts = [np.concatenate((np.maximum(x[:, :2], view[:2]), np.minimum(x[:, 2:], view[2:])), 1) for x in (a, b)]
    seen_a, seen_b = (_areas(part) for part in parts)
    low = np.maximum(parts[0][:, None, :2], parts[1][None, :, :2])
    high = np.minimum(parts[0][:, None, 2:], parts[1][None, :, 2:])
    shared = (high - low).clip(0).astype(np.float64).prod(2)
    overlap = shared / np.maximum(seen_a[:, None] + seen_b[None] - shared, 1e-9)
    visible_a, visible_b = (seen / np.maximum(_areas(x), 1e-9) for seen, x in ((seen_a, a), (seen_b, b)))
    visible = np.where(seen_a[:, None] <= seen_b[None], visible_a[:, None], visible_b[None])
    of_smaller = shared / np.maximum(np.minimum(seen_a[:, None], seen_b[None]), 1e-9)
    agree = (overlap > iou) | (near & (of_smaller > _SMALLER) & (visible >= _LEAST_SEEN))
    return np.where(agree, overlap, 0.0)


def _areas(boxes: Boxes) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]).clip(0).astype(np.float64).prod(1)
    return areas


def _groups(count: int, pairs: Sequence[tuple[float, int, int]], tile_of: NDArray[np.int64]) -> list[list[int]]:
    """Group the detections of each object, best pairs first, never two of one tile."""
    group_of = list(range(count))
    members = {number: [number] for number in range(count)}
    tiles = {number: {int(tile_of[number])} for number in range(count)}
    for _, a, b in pairs:
        one, other = group_of[a], group_of[b]
        if one != other and not tiles[one] & tiles[other]:
            for number in members[other]:
                group_of[number] = one
            members[one] += members.pop(other)
            tiles[one] |= tiles.pop(other)
    return list(members.values())


def _one(
    boxes: Boxes, scores: NDArray[np.float32], classes: NDArray[np.int64], touches: NDArray[np.bool_]
) -> tuple[float, ...]:
    """Return x1, y1, x2, y2, score and class of an object."""
    best = int(np.where(touches, -1.0, scores).argmax()) if not touches.all() else int(scores.argmax())
    box = boxes[best]
    if touches.all():
        box = np.concatenate((boxes[:, :2].min(0), boxes[:, 2:].max(0)))
    return (*box.tolist(), float(scores[best]), float(classes[best]))
