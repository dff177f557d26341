"""The cells that predictions belong to, over all levels.

Legend: A cells of an image, level by level, in a level by y, then x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Where the cells of an image are.

    Attributes:
        centres: float32 (A, 2), x, y in pixels.
        strides: float32 (A, 1), pixels a cell.
    """

    centres: Tensor
    strides: Tensor

    def at(self, cells: Tensor) -> Grid:
        """Some cells of a batch, int64 (P,) of image · A + cell, in place of the A of an image."""
        place = cells % len(self.centres)
        return Grid(self.centres[place], self.strides[place])


def make_grid(shapes_hw: Sequence[tuple[int, int]], strides: Sequence[float], device: torch.device) -> Grid:
    """Cells of levels whose maps have `shapes_hw` cells and `strides` pixels a cell."""
    centres, sizes = [], []
    for (ny, nx), stride in zip(shapes_hw, strides, strict=True):
        x = (torch.arange(nx, device=device, dtype=torch.float32) + 0.5) * stride
        y = (torch.arange(ny, device=device, dtype=torch.float32) + 0.5) * stride
        centres.append(torch.stack((x.expand(ny, nx), y[:, None].expand(ny, nx)), -1).view(-1, 2))
        sizes.append(torch.full((ny * nx, 1), stride, device=device))
    return Grid(torch.cat(centres), torch.cat(sizes))


def cells_last(x: Tensor) -> Tensor:
    """A level's map (B, C, ny, nx) as (B, ny·nx, C), in the order of the cells: a view of channels-last memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
