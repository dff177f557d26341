"""Grid cells of a head's levels: centres, strides, and the cells inside of boxes.

Legend: T boxes, L levels, A cells of an image, level by level, in a level by y, then x.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Positions of the cells of an image."""

    cells: Tensor  # float32 (A, 3), x and y of the centre, and the stride, in pixels

    @property
    def centres(self) -> Tensor:
        return self.cells[:, :2]

    @property
    def strides(self) -> Tensor:
        return self.cells[:, 2:]

    def at(self, cells: Tensor) -> Grid:
        """Return the grid of some cells of a batch, int64 (P,) of image · A + cell."""
        return Grid(self.cells[cells % len(self.cells)])


def arange_like(count: int, like: Tensor) -> Tensor:
    """Return 0 … count - 1 in float32 on the device of a tensor."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # an arange would stay on the device of the trace
        return like.new_ones(count, dtype=torch.float32).cumsum(0) - 1
    return torch.arange(count, device=like.device, dtype=torch.float32)


def make_grid(shapes_hw: Sequence[tuple[int, int]], strides: Sequence[float], like: Tensor) -> Grid:
    """Return the cells of levels with maps of `shapes_hw` cells and `strides` pixels per cell, on a tensor's device."""
    levels = []
    for (ny, nx), stride in zip(shapes_hw, strides, strict=True):
        x, y = ((arange_like(n, like) + 0.5) * stride for n in (nx, ny))
        sizes = x.new_full((ny, nx), stride)
        levels.append(torch.stack((x.expand(ny, nx), y[:, None].expand(ny, nx), sizes), -1).view(-1, 3))
    return Grid(torch.cat(levels))


@functools.lru_cache(64)  # of image sizes, which are few
def kept_grid(shapes_hw: tuple[tuple[int, int], ...], strides: tuple[float, ...], device: torch.device) -> Grid:
    """Return `make_grid` on a device, where it stays."""
    with torch.inference_mode(False):  # reused in training, even if validation comes first
        return make_grid(shapes_hw, strides, torch.zeros(0, device=device))


def cells_last(x: Tensor) -> Tensor:
    """Reshape a level's map (B, C, ny, nx) to (B, ny·nx, C), a view of channels-last memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def cells_inside(
    boxes_xyxy: NDArray[np.float64], strides: Sequence[float], grids_hw: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cells whose centre lies in each box (T, 4) in pixels, on every level of `grids_hw` cells.

    A side below the smallest stride counts as twice that stride, so that small boxes have cells too (YOLO26, arXiv
    2606.03748, section on small targets).

    Returns:
        x, y of the first cell, and numbers of columns and rows, int64 (T, L, 2) each; a number below 1 means none.
    """
    grids, sizes, least = np.array(grids_hw), np.array(strides)[:, None], min(strides)
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    small, middle = high - low < least, (low + high) / 2
    low, high = np.where(small, middle - least, low), np.where(small, middle + least, high)
    # A centre i + ½ lies in [low, high), in cells.
    first, end = (
        np.clip(np.ceil(side[:, None] / sizes - 0.5), 0, grids[:, ::-1]).astype(np.int64) for side in (low, high)
    )
    return first, end - first


def region_cells(
    regions: NDArray[np.float32], strides: Sequence[float], batch_size: int, grids_hw: Sequence[tuple[int, int]]
) -> list[NDArray[np.bool_]]:
    """Return whether each cell's centre lies in a region: bool (B, ny, nx) for each level.

    `regions` are float32 (R, 6): image, class, x1, y1, x2, y2 in pixels of the batch.
    """
    return [level == 0 for level in weights_of_cells(regions, np.zeros(len(regions)), strides, batch_size, grids_hw)]


def weights_of_cells(
    regions: NDArray[np.float32],
    weights: NDArray[np.floating],
    strides: Sequence[float],
    batch_size: int,
    grids_hw: Sequence[tuple[int, int]],
) -> list[NDArray[np.float32]]:
    """Return the least of the weights (R,) of regions around each cell, as in `region_cells`, else 1."""
    levels, less = [np.ones((batch_size, *grid_hw), np.float32) for grid_hw in grids_hw], weights < 1
    weights = weights[less]
    for number, part in _parts(levels, regions[less], strides):
        np.minimum(part, weights[number], out=part)
    return levels


def sets_of_cells(
    regions: NDArray[np.float32],
    sets: NDArray[np.bool_],
    strides: Sequence[float],
    batch_size: int,
    grids_hw: Sequence[tuple[int, int]],
) -> tuple[list[NDArray[np.int64]], NDArray[np.bool_]]:
    """Return the set of classes that are not labelled at each cell, (B, ny, nx) for each level, as rows of sets (S, C).

    Row 0 is the empty set. `regions` are as in `region_cells`, where class -2 - k is set k of `sets`, (K, C). Where
    regions overlap, as after mixup, the set is their union.
    """
    levels = [np.zeros((batch_size, *grid_hw), np.int64) for grid_hw in grids_hw]
    unions = [np.zeros_like(sets[0])]
    numbers = {unions[0].tobytes(): 0}
    for number, part in _parts(levels, regions, strides):
        own, before = sets[-2 - int(regions[number, 1])], part.copy()
        for earlier in np.unique(before).tolist():
            union = unions[earlier] | own
            row = numbers.setdefault(union.tobytes(), len(unions))
            if row == len(unions):
                unions.append(union)
            part[before == earlier] = row
    return levels, np.stack(unions)


def joined(levels: Sequence[NDArray[Any]]) -> Tensor:
    """Return arrays of levels, (B, …), as a tensor (B, numbers of all levels)."""
    return torch.from_numpy(np.concatenate([level.reshape(len(level), -1) for level in levels], 1))


def _parts(
    levels: Sequence[NDArray[Any]], regions: NDArray[np.float32], strides: Sequence[float]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the number of each region, and the cells of each level (B, ny, nx) whose centre lies in it, as a view."""
    first, counts = cells_inside(regions[:, 2:].astype(np.float64), strides, [level.shape[1:] for level in levels])
    images = regions[:, 0].astype(np.int64).tolist()
    for number, (image, corners, sizes) in enumerate(zip(images, first.tolist(), counts.tolist(), strict=True)):
        for level, (x, y), (columns, rows) in zip(levels, corners, sizes, strict=True):
            yield number, level[image, y : y + max(rows, 0), x : x + max(columns, 0)]
