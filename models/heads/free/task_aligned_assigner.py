"""Task-aligned target assignment (Feng et al., TOOD, 2021) of anchor-free heads.

Candidates follow from the labels alone: rectangles of cells, one per object and level. The host describes these, so
that every shape is known. The device lists the pairs of an object and a cell, in parts of limited memory, and selects
the pairs with the best predictions. Nothing synchronises, and the first of equal values wins, so that the result is
deterministic.

Legend: B images, T targets of a batch, G of them with candidates ("objects"), A cells of an image over all levels, N
rectangles, P pairs of an object and a cell, K cells that an object may get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.models.heads.criterion import Assignment, Targets
from tessera.models.heads.grid import cells_inside, ignored_cells, make_grid
from tessera.utils.boxes import box_iou

PAIRS = 2**19  # of a part, before its last object
# Smaller alignments count as 0. With a larger threshold small objects would never be trained: the best initial box of
# 32 pixels has an alignment of at most 1e-12 with an object of 4.
MIN_ALIGNMENT = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Part:
    """Some objects with their rectangles."""

    objects: slice
    rectangles: slice
    pairs: int  # P


@dataclass(frozen=True)
class AnchorFreeAssignment(Assignment):
    """Candidates of one batch, sorted by object, level, y, x.

    `counts` is (0,), because the divisor of the loss depends on the predictions. `ignored` is (B·A,).
    """

    # int64 (6, N): object; first cell as image · A + cell; cells per row; gap between rows; the part's cells before;
    # cells in total
    rectangles: Tensor
    grid: Tensor  # float32 (A, 3), see Grid
    classes: Tensor  # int64 (G,)
    boxes_xyxy: Tensor  # float32 (G, 4) in pixels of the batch
    slots: Tensor  # int64 (G, K), indices of each object's first K candidates in its part, padded with the last
    filled: Tensor  # bool (G, K), false for padding
    parts: tuple[Part, ...]  # all objects, in order
    batch_size: int
    grids_hw: tuple[tuple[int, int], ...]  # of each level

    @property
    def cells(self) -> int:
        """Number of cells of all images: B·A."""
        return self.batch_size * sum(ny * nx for ny, nx in self.grids_hw)

    @property
    def pairs(self) -> int:
        """Number of pairs in all parts."""
        return sum(part.pairs for part in self.parts)


def assign_candidates(
    targets: Targets, strides: Sequence[float], topk: int, batch_size: int, grids_hw: tuple[tuple[int, int], ...]
) -> AnchorFreeAssignment:
    """List the cells whose centre lies in an object, on every level; `topk` is K, `grids_hw` are sizes in cells.

    An object outside of the image has none.
    """
    rows = targets.objects.astype(np.float64)
    grids = np.array(grids_hw)
    level_starts = np.concatenate(([0], np.cumsum(grids.prod(1))))

    first, counts = cells_inside(rows[:, 2:], strides, grids_hw)
    sizes = np.maximum(counts, 0).prod(2)  # (T, L)
    keep = sizes.sum(1) > 0
    rows, first, counts, sizes = rows[keep], first[keep], counts[keep], sizes[keep]

    owners, level = np.nonzero(sizes)
    corner, size = first[owners, level], counts[owners, level]
    cells = level_starts[level] + corner[:, 1] * grids[level, 1] + corner[:, 0]
    cells += rows[owners, 0].astype(np.int64) * level_starts[-1]
    pairs = sizes[owners, level]
    before = np.cumsum(pairs) - pairs

    length = sizes.sum(1)
    start = np.cumsum(length) - length
    cuts = [0, *(np.flatnonzero(np.diff(start // PAIRS)) + 1).tolist(), len(rows)]
    parts, slots = [], np.minimum(np.arange(topk), length[:, None] - 1)
    for objects in map(slice, cuts[:-1], cuts[1:]):
        slots[objects] += (start[objects] - start[objects][:1])[:, None]
        its_rectangles = slice(*np.searchsorted(owners, (objects.start, objects.stop)).tolist())
        before[its_rectangles] -= before[its_rectangles][:1]
        parts.append(Part(objects, its_rectangles, int(length[objects].sum())))
    rectangles = np.stack((owners, cells, size[:, 0], grids[level, 1] - size[:, 0], before, pairs))
    ignored = None
    if len(targets.regions):
        levels = ignored_cells(targets.regions, strides, batch_size, grids_hw)
        ignored = torch.from_numpy(np.concatenate([inside.reshape(batch_size, -1) for inside in levels], 1)).flatten()
    return AnchorFreeAssignment(
        torch.zeros(0),
        rectangles=torch.from_numpy(rectangles),
        grid=make_grid(grids_hw, strides, torch.zeros(0)).cells,
        classes=torch.from_numpy(rows[:, 1].astype(np.int64)),
        boxes_xyxy=torch.from_numpy(rows[:, 2:].astype(np.float32)),
        slots=torch.from_numpy(slots),
        filled=torch.from_numpy(np.arange(topk) < length[:, None]),
        parts=tuple(parts),
        batch_size=batch_size,
        grids_hw=grids_hw,
        ignored=ignored,
    )


def list_candidates(assignment: AnchorFreeAssignment, part: Part) -> tuple[Tensor, Tensor]:
    """Return objects and cells, int64 (P,) each, of the pairs of a part, on the assignment's device."""
    rectangles = assignment.rectangles[:, part.rectangles]
    runs = torch.repeat_interleave(rectangles[5], output_size=part.pairs)
    owners, first, width, gap, before = rectangles[:5, runs]
    offset = torch.arange(part.pairs, device=owners.device) - before
    return owners, torch.addcmul(first + offset, offset // width, gap)


@dataclass(frozen=True)
class Matches:
    """Assigned cells of each object; no cell is used twice."""

    cells: Tensor  # int64 (G, K), image · A + cell
    targets: Tensor  # float32 (G, K), class target and weight of the box; 0 = unused slot


@torch.no_grad()
def assign_topk(
    boxes: Callable[[Tensor], Tensor],
    scores: Callable[[Tensor, Tensor], Tensor],
    assignment: AnchorFreeAssignment,
    alpha: float,
    beta: float,
    topk: int,
) -> Matches:
    """Assign to each object the cells that predict it best.

    The alignment of a prediction with an object is t = s^α · u^β, of the probability s of the object's class and the
    IoU u. An object gets its K candidates with the largest t; a cell of several objects goes to that with the largest
    u. The target is t, scaled so that an object's largest target is the largest u of its cells.

    Args:
        boxes: predicted boxes of cells, int64 (P,): float32 (P, 4), corners in pixels.
        scores: predicted probabilities of cells and classes, int64 (P,) each: float32 (P,).
        assignment: the candidates, on the same device.
        topk: K, at most as many as the assignment has slots.
    """
    best = []
    for part in assignment.parts:
        owners, cells = list_candidates(assignment, part)
        overlap = box_iou(boxes(cells), assignment.boxes_xyxy[owners])
        alignment = scores(cells, assignment.classes[owners]) ** alpha * overlap**beta
        # By object, then descending: positive floats are ordered as the integers of the same bits.
        keys = torch.sub(alignment.view(torch.int32), owners, alpha=2**32)
        order = keys.argsort(stable=True, descending=True)
        first = order[assignment.slots[part.objects, :topk]]
        best.append((cells[first], overlap[first], alignment[first]))
    cells, overlap, alignment = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*best, strict=True))
    keep = assignment.filled[:, :topk] & (alignment > MIN_ALIGNMENT)
    keep = keep & _wins(cells, torch.where(keep, overlap, -1.0), assignment.cells)
    alignment, overlap = torch.where(keep, alignment, 0.0), torch.where(keep, overlap, 0.0)
    largest = alignment.amax(1, keepdim=True).clamp(min=MIN_ALIGNMENT)
    return Matches(cells, alignment / largest * overlap.amax(1, keepdim=True))


def _wins(cells: Tensor, values: Tensor, count: int) -> Tensor:
    """Return whether a value, (G, K), is the largest of its cell, or the first of equal ones: bool (G, K)."""
    later = torch.arange(0, -len(cells), -1, device=cells.device)[:, None]
    keys = torch.add(later, values.view(torch.int32), alpha=2**32)  # by value, then object
    best = keys.new_full((count,), -(2**63)).scatter_reduce_(0, cells.flatten(), keys.flatten(), "amax")
    return keys == best[cells]
