"""Which cells could be trained to find which objects: it follows from the labels alone.

Choosing among them needs the predictions, and is done on the device (alignment.py); every shape is known here.

The candidates of an object are rectangles of cells, one a level. The host describes these; the device lists the pairs
of an object and a cell, for so few objects at a time that a crowd of large ones does not take its memory.

Legend: T targets of a batch, G of them with candidates ("objects"), A cells of an image over all levels, N rectangles,
P pairs of a part, K cells that an object may get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.cells import cells_inside
from tessera.models.heads.criterion import Assignment, Targets
from tessera.models.heads.ignored import ignored_cells

PAIRS = 2**19  # in a part begin no more


@dataclass(frozen=True)
class Part:
    """Some objects, known to the host.

    Attributes:
        objects: which they are.
        rectangles: theirs.
        pairs: of them and their candidates: P.
    """

    objects: slice
    rectangles: slice
    pairs: int


@dataclass(frozen=True)
class FreeAssignment(Assignment):
    """The candidates of one batch, sorted by object, level, y, x.

    Attributes:
        counts: (0,): what the loss is divided by, only the predictions tell.
        rectangles: int64 (5, N): object; first cell as image · A + cell; cells a row; cells from the end of a
            row to the next; cells in all.
        classes: int64 (G,).
        boxes_xyxy: float32 (G, 4) in pixels of the batch.
        slots: int64 (G, K), places of each object's first K candidates in its part; the last one again where it has
            fewer.
        filled: bool (G, K), false where it has fewer.
        parts: all objects, in order.
        batch_size: images.
        grids_hw: height and width of each level's grid.
        ignored: (B·A,).
    """

    rectangles: Tensor
    classes: Tensor
    boxes_xyxy: Tensor
    slots: Tensor
    filled: Tensor
    parts: tuple[Part, ...]
    batch_size: int
    grids_hw: tuple[tuple[int, int], ...]

    @property
    def cells(self) -> int:
        """Of all images: B·A."""
        return self.batch_size * sum(ny * nx for ny, nx in self.grids_hw)

    @property
    def pairs(self) -> int:
        """Of an object and a candidate, in all parts."""
        return sum(part.pairs for part in self.parts)


def assign_candidates(
    targets: Targets,
    strides: Sequence[float],
    most: int,
    batch_size: int,
    grids_hw: tuple[tuple[int, int], ...],
) -> FreeAssignment:
    """List the cells whose centre lies in an object, on every level.

    An object has none where it lies outside the image.

    Args:
        targets: of the batch.
        strides: pixels a cell of each level.
        most: K.
        batch_size: images of the batch.
        grids_hw: height and width of each level in cells.
    """
    rows = targets.objects.astype(np.float64)
    grids = np.array(grids_hw)
    level_starts = np.concatenate(([0], np.cumsum(grids.prod(1))))

    first, counts = cells_inside(rows[:, 2:], strides, grids_hw)
    found = np.maximum(counts, 0).prod(2)  # (T, L)
    kept = found.sum(1) > 0
    rows, first, counts, found = rows[kept], first[kept], counts[kept], found[kept]

    owners, level = np.nonzero(found)
    corner, size = first[owners, level], counts[owners, level]
    cells = level_starts[level] + corner[:, 1] * grids[level, 1] + corner[:, 0]
    cells += rows[owners, 0].astype(np.int64) * level_starts[-1]
    rectangles = np.stack((owners, cells, size[:, 0], grids[level, 1] - size[:, 0], found[owners, level]))

    length = found.sum(1)
    start = np.cumsum(length) - length
    cuts = [0, *(np.flatnonzero(np.diff(start // PAIRS)) + 1).tolist(), len(rows)]
    parts, slots = [], np.minimum(np.arange(most), length[:, None] - 1)
    for objects in map(slice, cuts[:-1], cuts[1:]):
        slots[objects] += (start[objects] - start[objects][:1])[:, None]
        its_rectangles = slice(*np.searchsorted(owners, (objects.start, objects.stop)).tolist())
        parts.append(Part(objects, its_rectangles, int(length[objects].sum())))
    return FreeAssignment(
        counts=torch.zeros(0),
        rectangles=torch.from_numpy(rectangles),
        classes=torch.from_numpy(rows[:, 1].astype(np.int64)),
        boxes_xyxy=torch.from_numpy(rows[:, 2:].astype(np.float32)),
        slots=torch.from_numpy(slots),
        filled=torch.from_numpy(np.arange(most) < length[:, None]),
        parts=tuple(parts),
        batch_size=batch_size,
        grids_hw=grids_hw,
        ignored=_ignored(targets.regions, strides, batch_size, grids_hw) if len(targets.regions) else None,
    )


def _ignored(
    regions: NDArray[np.float32], strides: Sequence[float], batch_size: int, grids_hw: tuple[tuple[int, int], ...]
) -> Tensor:
    """Whether a cell lies in an ignored region, bool (B·A,)."""
    levels = ignored_cells(regions, strides, batch_size, grids_hw)
    return torch.from_numpy(np.concatenate([level.reshape(batch_size, -1) for level in levels], 1)).flatten()


def list_candidates(assignment: FreeAssignment, part: Part) -> tuple[Tensor, Tensor]:
    """Objects and cells, int64 (P,) each, of the pairs of a part, on the assignment's device."""
    owners, cells, width, gap, length = assignment.rectangles[:, part.rectangles]
    runs = torch.arange(len(owners), device=owners.device).repeat_interleave(length, output_size=part.pairs)
    place = torch.arange(part.pairs, device=owners.device) - (length.cumsum(0) - length)[runs]
    return owners[runs], cells[runs] + place + place // width[runs] * gap[runs]
