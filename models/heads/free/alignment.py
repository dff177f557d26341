"""Which candidates are trained, and how much: those whose prediction is already the best (Feng et al., TOOD, 2021).

Nothing is read back from the device and every shape is known to the host. Equal values go to the candidate that comes
first, so that the result is determined.

Legend: B images, A cells of an image, G objects, K cells that an object may get, P pairs of an object and a cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.models.heads.free.assignment import FreeAssignment, list_candidates
from tessera.utils.boxes import box_iou

# An alignment below this is none: float32 has no more digits for it. With a larger limit small objects would never be
# trained: of a fresh head's boxes of 32 pixels, the best for an object of 4 has an alignment of 1e-12 or less.
NOTHING = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Matches:
    """What the slots of each object are trained for.

    Attributes:
        cells: int64 (G, K), image · A + cell.
        targets: float32 (G, K), the class target and the weight of the box; 0 where a slot is not used. No cell is used
            twice.
    """

    cells: Tensor
    targets: Tensor


@torch.no_grad()
def align(
    boxes: Callable[[Tensor], Tensor],
    scores: Callable[[Tensor, Tensor], Tensor],
    assignment: FreeAssignment,
    alpha: float,
    beta: float,
    most: int,
) -> Matches:
    """Give each object the cells that predict it best.

    The alignment of a prediction with an object is t = s^α · u^β, of the probability s of the object's class and the
    IoU u. An object gets its K candidates with the largest t; a cell that several objects get stays with the one of the
    largest u. The target is t, scaled so that the largest of an object is the largest u of its cells.

    Args:
        boxes: of cells, int64 (P,), what is predicted there, float32 (P, 4), corners in pixels: for a few at a time.
        scores: of cells and classes, int64 (P,) each, what is predicted there, float32 (P,).
        assignment: the candidates, on the same device.
        alpha, beta: α and β.
        most: K, at most as many as the assignment has slots.
    """
    best = []
    for part in assignment.parts:
        owners, cells = list_candidates(assignment, part)
        overlap = box_iou(boxes(cells), assignment.boxes_xyxy[owners])
        alignment = scores(cells, assignment.classes[owners]) ** alpha * overlap**beta
        # By object, in it descending: floats of one sign are ordered as the integers of the same bits.
        order = ((owners << 32) - alignment.view(torch.int32)).argsort(stable=True)
        first = order[assignment.slots[part.objects, :most]]
        best.append((cells[first], overlap[first], alignment[first]))
    cells, overlap, alignment = map(torch.cat, zip(*best, strict=True))
    kept = assignment.filled[:, :most] & (alignment > NOTHING)
    kept = kept & _wins(cells, torch.where(kept, overlap, -1.0), assignment.cells)
    alignment, overlap = torch.where(kept, alignment, 0.0), torch.where(kept, overlap, 0.0)
    largest = alignment.amax(1, keepdim=True).clamp(min=NOTHING)
    return Matches(cells, alignment / largest * overlap.amax(1, keepdim=True))


def _wins(cells: Tensor, values: Tensor, count: int) -> Tensor:
    """Whether a value, (G, K), is the largest of its cell; of equal ones that of the first object. bool (G, K)."""
    where = cells.flatten()
    best = values.new_full((count,), -1.0).scatter_reduce_(0, where, values.flatten(), "amax")
    equal = values == best[cells]
    objects = torch.arange(len(cells), device=cells.device)[:, None].expand_as(cells)
    candidates = torch.where(equal, objects, len(cells))
    first = cells.new_full((count,), len(cells)).scatter_reduce_(0, where, candidates.flatten(), "amin")
    return equal & (objects == first[cells])
