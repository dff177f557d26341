"""Which cells could be trained to find which objects: it follows from the labels alone.

Choosing among them needs the predictions, and is done on the device (alignment.py); every shape is known here.

Legend: T targets of a batch, G of them with candidates ("objects"), A cells of an image over all levels, P candidates
(pairs of an object and a cell), K cells that an object may get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.heads.criterion import Assignment


@dataclass(frozen=True)
class FreeAssignment(Assignment):
    """The candidates of one batch, sorted by object, level, y, x.

    Attributes:
        counts: (0,): what the loss is divided by, only the predictions tell.
        cells: int64 (P,), image · A + cell.
        owners: int64 (P,), the object of each candidate.
        classes: int64 (G,).
        boxes_xyxy: float32 (G, 4) in pixels of the batch.
        slots: int64 (G, K), places of each object's first K candidates; the last one again where it has fewer.
        filled: bool (G, K), false where it has fewer.
        batch_size: images.
        grids_hw: height and width of each level's grid.
    """

    cells: Tensor
    owners: Tensor
    classes: Tensor
    boxes_xyxy: Tensor
    slots: Tensor
    filled: Tensor
    batch_size: int
    grids_hw: tuple[tuple[int, int], ...]


def assign_candidates(
    targets: Tensor, strides: Sequence[float], most: int, batch_size: int, size_hw: tuple[int, int]
) -> FreeAssignment:
    """List the cells whose centre lies in an object, on every level.

    A side below the smallest stride counts as twice that stride here, so that a small object has a few candidates too
    (YOLO26, arXiv 2606.03748, section on small targets). An object has none where it lies outside the image.

    Args:
        targets: float32 (T, 6) on the CPU, rows image, class, x1, y1, x2, y2 in pixels of the batch.
        strides: pixels a cell of each level.
        most: K.
        batch_size: images of the batch.
        size_hw: height and width of the batch's images in pixels, multiples of every stride.
    """
    assert targets.ndim == 2 and targets.shape[1] == 6, targets.shape
    rows = targets.detach().numpy().astype(np.float64)
    assert len(rows) == 0 or (rows[:, 0].min() >= 0 and rows[:, 0].max() < batch_size), "image outside the batch"
    grids_hw = tuple((int(size_hw[0] / stride), int(size_hw[1] / stride)) for stride in strides)
    grids, sizes = np.array(grids_hw), np.array(strides)[:, None]
    level_starts = np.concatenate(([0], np.cumsum(grids.prod(1))))

    low, high = (side[:, None] / sizes for side in _widened(rows[:, 2:], float(min(strides))))  # (T, L, 2) in cells
    # A centre i + ½ lies in [low, high).
    first = np.clip(np.ceil(low - 0.5), 0, grids[:, ::-1]).astype(np.int64)
    counts = np.clip(np.ceil(high - 0.5), 0, grids[:, ::-1]).astype(np.int64) - first
    found = np.maximum(counts, 0).prod(2)  # (T, L)
    kept = found.sum(1) > 0
    rows, first, counts, found = rows[kept], first[kept], counts[kept], found[kept]

    part, place = _runs(found.ravel())  # of an object and a level, and in it
    owners, level = np.divmod(part, len(grids))
    y, x = np.divmod(place, counts.reshape(-1, 2)[part, 0])
    corner = first.reshape(-1, 2)[part]
    cells = level_starts[level] + (corner[:, 1] + y) * grids[level, 1] + corner[:, 0] + x
    cells += rows[owners, 0].astype(np.int64) * level_starts[-1]

    length = found.sum(1)
    start = np.cumsum(length) - length
    slots = start[:, None] + np.minimum(np.arange(most), length[:, None] - 1)
    return FreeAssignment(
        counts=torch.zeros(0),
        cells=torch.from_numpy(cells),
        owners=torch.from_numpy(owners),
        classes=torch.from_numpy(rows[:, 1].astype(np.int64)),
        boxes_xyxy=torch.from_numpy(rows[:, 2:].astype(np.float32)),
        slots=torch.from_numpy(slots),
        filled=torch.from_numpy(np.arange(most) < length[:, None]),
        batch_size=batch_size,
        grids_hw=grids_hw,
    )


def _widened(boxes_xyxy: NDArray[np.float64], least: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Low and high corners (T, 2) of boxes, sides below `least` widened to twice that about their middle."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    small = high - low < least
    middle = (low + high) / 2
    return np.where(small, middle - least, low), np.where(small, middle + least, high)


def _runs(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For runs of `lengths` side by side: the run of each entry, and its place in it."""
    run = np.arange(len(lengths)).repeat(lengths)
    starts = np.cumsum(lengths) - lengths
    return run, np.arange(len(run)) - starts[run]
