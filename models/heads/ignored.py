"""Which cells show an ignored region: neither object nor background, so that nothing is learnt there.

Legend: B images, R regions of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.models.heads.cells import cells_inside


def ignored_cells(
    regions: NDArray[np.float32], strides: Sequence[float], batch_size: int, grids_hw: Sequence[tuple[int, int]]
) -> list[NDArray[np.bool_]]:
    """Whether a cell's centre lies in an ignored region, bool (B, ny, nx) of each level.

    Args:
        regions: float32 (R, 6): image, class -1, x1, y1, x2, y2 in pixels of the batch.
        strides: pixels a cell of each level.
        batch_size: B.
        grids_hw: height and width of each level in cells.
    """
    levels = [np.zeros((batch_size, *grid_hw), np.bool_) for grid_hw in grids_hw]
    first, counts = cells_inside(regions[:, 2:].astype(np.float64), strides, grids_hw)
    for image, corners, sizes in zip(regions[:, 0].astype(np.int64), first.tolist(), counts.tolist(), strict=True):
        for level, (x, y), (columns, rows) in zip(levels, corners, sizes, strict=True):
            level[image, y : y + max(rows, 0), x : x + max(columns, 0)] = True
    return levels
