"""Target assignment of the anchor-based head, from labels and anchors alone.

Predictions play no part, so that the assignment runs on the host before the forward. The device gets index tensors of
known length, and the loss never synchronises.

Legend: T targets of a batch, L detection levels, A anchors of a level, P positives (of all levels, level by level), U
cells with at least one positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.criterion import Assignment, Targets
from tessera.models.heads.grid import ignored_cells
from tessera.utils.boxes import xyxy_to_cxcywh

# Steps (x, y) from the centre's cell: none, left, up, right, down. The last write in this order counts.
_STEPS = np.array([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]])


@dataclass(frozen=True)
class AnchorAssignment(Assignment):
    """Positives of one batch.

    A cell here is one prediction: image, anchor, y, x. Positives are ordered by level, then by step (centre, left, up,
    right, down), anchor and target; several may share a cell. `counts` is float32 (L, 2), positives and predictions of
    each level; `ignored` is false for the cells of `cells`.
    """

    cells: Tensor  # int64 (4, U), image, anchor, y, x; level by level, each cell once
    last_positives: Tensor  # int64 (U,), positive that sets the objectness target of each cell
    positive_cells: Tensor  # int64 (P,), column of `cells` of each positive
    classes: Tensor  # int64 (P,)
    boxes: Tensor  # float32 (P, 4), cxcywh in grid units, the centre counted from the cell's corner
    anchors: Tensor  # float32 (P, 2), width and height in grid units
    cells_per_level: tuple[int, ...]  # U of each level
    positives_per_level: tuple[int, ...]  # P of each level
    grids_hw: tuple[tuple[int, int], ...]
    batch_size: int


class _Level(NamedTuple):
    """One level's part of an AnchorAssignment, in NumPy; cells as rows (U, 4)."""

    cells: NDArray[np.int64]
    last_positives: NDArray[np.int64]
    positive_cells: NDArray[np.int64]
    classes: NDArray[np.int64]
    boxes: NDArray[np.float32]
    anchors: NDArray[np.float32]


def assign_targets(
    targets: Targets,
    anchors: NDArray[np.float32],
    strides: Sequence[float],
    anchor_t: float,
    batch_size: int,
    grids_hw: tuple[tuple[int, int], ...],
) -> AnchorAssignment:
    """Match targets with anchors and cells on every level.

    An anchor, of float32 (L, A, 2) in grid units of its level, matches a target if the ratio of each side is below
    `anchor_t`. The match counts in the cell of the target's centre and in up to two neighbours within half a cell of
    it, inside of the image. `grids_hw` are sizes of the levels in cells.
    """
    levels: list[_Level] = []
    cells_per_level: tuple[int, ...] = ()
    positives_per_level: tuple[int, ...] = ()
    for level_anchors, stride, grid_hw in zip(anchors, strides, grids_hw, strict=True):
        level = _assign_level(targets.objects, level_anchors, np.float32(stride), anchor_t, batch_size, grid_hw)
        last = level.last_positives + sum(positives_per_level)
        lies_in = level.positive_cells + sum(cells_per_level)
        levels.append(level._replace(last_positives=last, positive_cells=lies_in))
        cells_per_level += (len(last),)
        positives_per_level += (len(lies_in),)
    whole = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*levels, strict=True)]
    cells, last_positives, positive_cells, classes, boxes, matched = whole
    ignored = None
    if len(targets.regions):
        alone = Targets(targets.regions, targets.regions[:0])
        as_objects = assign_targets(alone, anchors, strides, anchor_t, batch_size, grids_hw)
        inside = ignored_cells(targets.regions, strides, batch_size, grids_hw)
        ignored = _ignored(inside, as_objects, [level.cells for level in levels], len(anchors[0]))
    predictions_per_level = [batch_size * anchors.shape[1] * ny * nx for ny, nx in grids_hw]
    return AnchorAssignment(
        torch.tensor(list(zip(positives_per_level, predictions_per_level, strict=True)), dtype=torch.float32),
        cells.T.contiguous(),
        last_positives,
        positive_cells,
        classes,
        boxes,
        matched,
        cells_per_level,
        positives_per_level,
        grids_hw,
        batch_size,
        ignored=ignored,
    )


def _ignored(
    inside: Sequence[NDArray[np.bool_]],
    as_objects: AnchorAssignment,
    positives: Sequence[NDArray[np.int64]],
    anchors: int,
) -> Tensor:
    """Return the mask of predictions in ignored regions that are assigned to no object, over all levels.

    `inside`, bool (B, ny, nx) of each level, are cells whose centre lies in a region; `as_objects` is the assignment
    with regions as objects; `positives`, (U, 4) of each level, are cells assigned to objects.
    """
    levels = []
    matching = as_objects.cells.T.split(list(as_objects.cells_per_level))
    for level, would, positive in zip(inside, matching, positives, strict=True):
        ignored = np.repeat(level[:, None], anchors, 1)
        ignored[tuple(would.numpy().T)] = True
        ignored[tuple(positive.T)] = False
        levels.append(ignored.ravel())
    return torch.from_numpy(np.concatenate(levels))


def _assign_level(
    rows: NDArray[np.float32],
    anchors: NDArray[np.float32],
    stride: np.float32,
    anchor_t: float,
    batch_size: int,
    grid_hw: tuple[int, int],
) -> _Level:
    """Match all targets with the anchors (A, 2) of one level; indices count from the level's start."""
    ny, nx = grid_hw
    boxes = xyxy_to_cxcywh(rows[:, 2:] / stride)
    size, limit = boxes[:, 2:], np.float32(anchor_t)
    # max(r, 1/r) < limit, without a division that a side of 0 would break
    matches = ((size < limit * anchors[:, None]) & (anchors[:, None] < limit * size)).all(2)
    anchor, target = np.nonzero(matches)

    centre = boxes[target, :2]
    corner = np.clip(np.floor(centre).astype(np.int64), 0, (nx - 1, ny - 1))
    within = centre - corner
    near_low, near_high = within < 0.5, within > 0.5
    reached = (near_low & (corner > 0)).T, (near_high & (corner < (nx - 1, ny - 1))).T
    in_cell = np.concatenate((np.ones((1, len(target)), bool), *reached))
    step, match = np.nonzero(in_cell)
    anchor, target = anchor[match], target[match]
    cell_xy = corner[match] + _STEPS[step]

    image = rows[target, 0].astype(np.int64)
    shape = (batch_size, len(anchors), ny, nx)
    flat = np.ravel_multi_index((image, anchor, cell_xy[:, 1], cell_xy[:, 0]), shape)
    # The first occurrence seen from the end is the last write.
    cells, first, positive_cells = np.unique(flat[::-1], return_index=True, return_inverse=True)
    return _Level(
        cells=np.stack(np.unravel_index(cells, shape), axis=1).astype(np.int64),
        last_positives=len(flat) - 1 - first,
        positive_cells=positive_cells[::-1],
        classes=rows[target, 1].astype(np.int64),
        boxes=np.concatenate((boxes[target, :2] - cell_xy.astype(np.float32), boxes[target, 2:]), axis=1),
        anchors=anchors[anchor],
    )
