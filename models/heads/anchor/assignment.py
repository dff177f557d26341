"""Which predictions are trained to find which objects: it follows from the labels and the anchors alone.

The predictions play no part in it, so it is done on the host before the forward, where dynamic shapes and sorting cost
nothing. The device gets index tensors of known length, and no part of the loss waits for a result to come back.

Legend: T targets of a batch, L detection layers ("levels"), A anchors of a level, P candidates (the positives of all
levels, level by level), U cells that at least one candidate lies in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.criterion import Assignment
from tessera.utils.boxes import xyxy_to_cxcywh

# Steps (x, y) from the centre's cell: none, then left, up, right, down. The order decides whose write is the last.
_STEPS = np.array([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]])


@dataclass(frozen=True)
class AnchorAssignment(Assignment):
    """The positives of one batch.

    A cell here is one prediction: image, anchor, y, x. Candidates are ordered by level, then by step (centre, left, up,
    right, down), anchor and target; several may lie in one cell, and the last of them sets its objectness target.

    Attributes:
        cells: int64 (4, U), image, anchor, y, x; level by level, each cell once.
        last_candidates: int64 (U,), the candidate that sets the objectness target of each cell.
        candidate_cells: int64 (P,), the column of `cells` that each candidate lies in.
        classes: int64 (P,).
        boxes: float32 (P, 4), cxcywh in grid units, the centre counted from the cell's corner.
        anchors: float32 (P, 2), width and height in grid units.
        counts: float32 (L, 2), positives and predictions of each level. Summed over the ranks they are what the
            loss is divided by.
        cells_per_level, positives_per_level: how U and P are made up, known to the host.
        grids_hw: height and width of each level's grid.
        batch_size: images.
    """

    cells: Tensor
    last_candidates: Tensor
    candidate_cells: Tensor
    classes: Tensor
    boxes: Tensor
    anchors: Tensor
    cells_per_level: tuple[int, ...]
    positives_per_level: tuple[int, ...]
    grids_hw: tuple[tuple[int, int], ...]
    batch_size: int


@dataclass(frozen=True)
class _Level:
    """One level's part of an AnchorAssignment, in NumPy; indices count from the level's own start."""

    cells: NDArray[np.int64]
    last_candidates: NDArray[np.int64]
    candidate_cells: NDArray[np.int64]
    classes: NDArray[np.int64]
    boxes: NDArray[np.float32]
    anchors: NDArray[np.float32]


def assign_targets(
    targets: Tensor,
    anchors: NDArray[np.float32],
    strides: NDArray[np.float32],
    anchor_t: float,
    batch_size: int,
    size_hw: tuple[int, int],
) -> AnchorAssignment:
    """Match targets with anchors and cells on every level.

    An anchor matches a target where neither side is `anchor_t` times as long as the other's, or more. The match counts
    in the cell of the target's centre and in up to two neighbours within half a cell of it, none across the border.

    Args:
        targets: float32 (T, 6) on the CPU, rows image, class, x1, y1, x2, y2 in pixels of the batch.
        anchors: float32 (L, A, 2), in grid units of their level.
        strides: float32 (L,), pixels a cell.
        anchor_t: the limit on the ratio of sides.
        batch_size: images of the batch.
        size_hw: height and width of the batch's images in pixels, multiples of every stride.
    """
    assert targets.ndim == 2 and targets.shape[1] == 6, targets.shape
    rows = targets.detach().numpy().astype(np.float32, copy=False)
    assert len(rows) == 0 or (rows[:, 0].min() >= 0 and rows[:, 0].max() < batch_size), "image outside the batch"

    grids_hw = tuple((int(size_hw[0] / stride), int(size_hw[1] / stride)) for stride in strides)
    levels = [
        _assign_level(rows, level_anchors, stride, anchor_t, batch_size, grid_hw)
        for level_anchors, stride, grid_hw in zip(anchors, strides, grids_hw, strict=True)
    ]
    cells_per_level = tuple(len(level.last_candidates) for level in levels)
    positives_per_level = tuple(len(level.candidate_cells) for level in levels)
    first_cell = np.cumsum((0, *cells_per_level[:-1]))
    first_positive = np.cumsum((0, *positives_per_level[:-1]))
    predictions_per_level = [batch_size * anchors.shape[1] * ny * nx for ny, nx in grids_hw]
    return AnchorAssignment(
        cells=torch.from_numpy(np.concatenate([level.cells for level in levels], axis=1)),
        last_candidates=torch.from_numpy(
            np.concatenate([level.last_candidates + first for level, first in zip(levels, first_positive, strict=True)])
        ),
        candidate_cells=torch.from_numpy(
            np.concatenate([level.candidate_cells + first for level, first in zip(levels, first_cell, strict=True)])
        ),
        classes=torch.from_numpy(np.concatenate([level.classes for level in levels])),
        boxes=torch.from_numpy(np.concatenate([level.boxes for level in levels])),
        anchors=torch.from_numpy(np.concatenate([level.anchors for level in levels])),
        counts=torch.tensor(list(zip(positives_per_level, predictions_per_level, strict=True)), dtype=torch.float32),
        cells_per_level=cells_per_level,
        positives_per_level=positives_per_level,
        grids_hw=grids_hw,
        batch_size=batch_size,
    )


def _assign_level(
    rows: NDArray[np.float32],
    anchors: NDArray[np.float32],
    stride: np.float32,
    anchor_t: float,
    batch_size: int,
    grid_hw: tuple[int, int],
) -> _Level:
    """Match all targets with the anchors (A, 2) of one level whose grid is (ny, nx)."""
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
    in_cell = np.concatenate(
        (
            np.ones((1, len(target)), bool),
            (near_low & (corner > 0)).T,
            (near_high & (corner < (nx - 1, ny - 1))).T,
        )
    )
    step, match = np.nonzero(in_cell)
    anchor, target = anchor[match], target[match]
    cell_xy = corner[match] + _STEPS[step]

    image = rows[target, 0].astype(np.int64)
    shape = (batch_size, len(anchors), ny, nx)
    flat = np.ravel_multi_index((image, anchor, cell_xy[:, 1], cell_xy[:, 0]), shape)
    # The first occurrence seen from the end is the last write.
    cells, first, candidate_cells = np.unique(flat[::-1], return_index=True, return_inverse=True)
    return _Level(
        cells=np.stack(np.unravel_index(cells, shape)).astype(np.int64),
        last_candidates=len(flat) - 1 - first,
        candidate_cells=candidate_cells[::-1],
        classes=rows[target, 1].astype(np.int64),
        boxes=np.concatenate((boxes[target, :2] - cell_xy.astype(np.float32), boxes[target, 2:]), axis=1),
        anchors=anchors[anchor],
    )
