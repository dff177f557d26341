"""Which cells of the levels lie in a box.

Legend: T boxes, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def widened(boxes_xyxy: NDArray[np.float64], least: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Low and high corners (T, 2) of boxes, sides below `least` widened to twice that about their middle."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    small = high - low < least
    middle = (low + high) / 2
    return np.where(small, middle - least, low), np.where(small, middle + least, high)


def cells_inside(
    boxes_xyxy: NDArray[np.float64], strides: Sequence[float], grids_hw: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cells whose centre lies in each box, on every level: its first column and row, and how many of each.

    A side below the smallest stride counts as twice that stride, so that a small box has a few cells too (YOLO26, arXiv
    2606.03748, section on small targets).

    Args:
        boxes_xyxy: (T, 4) in pixels.
        strides: pixels a cell of each of L levels.
        grids_hw: height and width of each level in cells.

    Returns:
        x, y of the first cell, and numbers of columns and rows, int64 (T, L, 2) each; a number below 1 is none.
    """
    grids, sizes = np.array(grids_hw), np.array(strides)[:, None]
    low, high = (side[:, None] / sizes for side in widened(boxes_xyxy, min(strides)))  # (T, L, 2) in cells
    # A centre i + ½ lies in [low, high).
    first = np.clip(np.ceil(low - 0.5), 0, grids[:, ::-1]).astype(np.int64)
    return first, np.clip(np.ceil(high - 0.5), 0, grids[:, ::-1]).astype(np.int64) - first
