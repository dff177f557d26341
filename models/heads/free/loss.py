"""The training loss of the anchor-free head, as sums over what this rank holds (see models/heads/criterion.py).

Legend: B images, A cells of an image, G objects, K slots of an object (see assignment.py), S = G·K, R bins, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.heads.criterion import Criterion, SumOverRanks, alone
from models.heads.free.alignment import Matches, align
from models.heads.free.assignment import FreeAssignment, assign_candidates
from models.heads.free.grid import Grid, make_grid
from models.heads.free.layers import FreeLayers
from utils.boxes import complete_iou
from utils.config import Hyp

log = logging.getLogger(__name__)

# Targets are added up over the ranks as whole numbers of 1 / UNIT, whose sum depends on no order.
UNIT = 2**16
LARGEST_BIN_SHARE = 0.01  # a distance beyond the last bin is trained as this much less than the last


class _Branch(NamedTuple):
    """What branches of one kind predict, (B·A, 4 R) and (B·A, C), and the cells that are trained."""

    raw: Tensor
    logits: Tensor
    matches: Matches


class FreeLoss(Criterion[FreeAssignment]):
    """Box, class and distance loss of an anchor-free head, in float32 whatever the model computes in.

    Over the matched cells, each weighted by its target score t: box = Σ t (1 − CIoU); distance = Σ t · mean over the
    four sides of the cross-entropy of the two bins next to the true distance (Li et al., Generalized Focal Loss, 2020),
    or with one bin |error| in strides. Over all cells and classes: class = Σ binary cross-entropy against t for the
    object's class of a matched cell, 0 elsewhere. All are divided by Σ t of the whole batch.

    Branches that predict each object once have the same three losses, matched with one cell an object, and are added.
    """

    def __init__(self, head: FreeLayers, hyp: Hyp, *, label_smoothing: float = 0.0) -> None:
        """Prepare the loss.

        Args:
            head: the model's last module.
            hyp: hyperparameters; box, cls, dfl, topk, alpha and beta are read.
            label_smoothing: has no effect, which is said.
        """
        if label_smoothing:
            log.warning("--label-smoothing has no effect: the class targets of this head are soft already.")
        names = ("box", "cls", "dfl" if head.reg_max > 1 else "l1")
        self._most = (round(hyp.topk),) if head.one_to_one is None else (round(hyp.topk), 1)
        self.names = tuple(prefix + name for prefix in ("", "one_")[: len(self._most)] for name in names)
        self._gains = (hyp.box, hyp.cls, hyp.dfl)
        self._head, self._hyp = head, hyp

    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> FreeAssignment:
        """List the cells that could find each object; host work, before the forward.

        Args:
            targets: float32 (T, 6) on the CPU, rows image, class, x1, y1, x2, y2 in pixels of the batch.
            batch_size: images of the batch.
            size_hw: height and width of the images as the model gets them.
        """
        nc = self._head.nc
        assert len(targets) == 0 or int(targets[:, 1].max()) < nc, f"class outside the head's {nc}"
        return assign_candidates(targets, self._head.strides, self._most[0], batch_size, size_hw)

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: FreeAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = alone,
    ) -> tuple[Tensor, Tensor]:
        """Loss of a batch: this rank's sums over the target scores of all ranks.

        Args:
            predictions: raw boxes (B, A, 4 R) and classes (B, A, C) of the branches, in any float dtype.
            assignment: of the same batch, on the same device.
            global_counts: not needed.
            sum_over_ranks: for the target scores.

        Returns:
            The loss, a scalar; and its parts, detached (3,), or (6,) with branches that predict once. Added up over the
            ranks, both are the mean losses of the whole batch (not multiplied by its size).
        """
        grid, found = self._match(predictions, assignment)
        summing = sum_over_ranks(_units(found))
        sums = self._sums(assignment, grid, found)
        parts = (sums / (summing().float() / UNIT).clamp(min=1)[:, None]).flatten()
        return parts.sum(), parts.detach()

    def totals(self, predictions: Sequence[Tensor], assignment: FreeAssignment) -> Tensor:
        """Float32 (1 or 2, 4), a row for each kind of branches: sums of box, cls and dfl, and of the target scores."""
        grid, found = self._match(predictions, assignment)
        return torch.cat((self._sums(assignment, grid, found), _units(found).float()[:, None] / UNIT), 1)

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        """The losses from a sum of `totals`."""
        return tuple((totals[:, :3] / np.maximum(totals[:, 3:], 1)).flatten().tolist())

    def _match(self, predictions: Sequence[Tensor], assignment: FreeAssignment) -> tuple[Grid, list[_Branch]]:
        """The cells of the batch's images, and what each kind of branches predicts and is trained for."""
        grid = make_grid(assignment.grids_hw, self._head.strides, predictions[0].device)
        shape = (assignment.batch_size, len(grid.centres))
        found = []
        for raw, logits, most in zip(predictions[::2], predictions[1::2], self._most, strict=True):
            assert raw.shape == (*shape, 4 * self._head.reg_max), raw.shape
            assert logits.shape == (*shape, self._head.nc), logits.shape
            boxes = self._head.boxes(raw.detach(), grid).flatten(0, 1)
            scores = logits.detach().flatten(0, 1)
            matches = align(boxes, scores, assignment, self._hyp.alpha, self._hyp.beta, most)
            found.append(_Branch(raw.flatten(0, 1), logits.flatten(0, 1), matches))
        return grid, found

    def _sums(self, assignment: FreeAssignment, grid: Grid, found: Sequence[_Branch]) -> Tensor:
        """The three losses of each kind of branches with their gains, as sums: float32 (1 or 2, 3)."""
        return torch.stack([self._sums_of(assignment, grid, branch) for branch in found])

    def _sums_of(self, assignment: FreeAssignment, grid: Grid, branch: _Branch) -> Tensor:
        raw, logits, matches = branch
        cells, weights = matches.cells.flatten(), matches.targets.flatten()
        owners = torch.arange(len(matches.cells), device=cells.device).repeat_interleave(
            matches.cells.shape[1], output_size=len(cells)
        )
        cls = _SoftCrossEntropy.apply(logits, cells, assignment.classes[owners], weights)

        # An embedding is an index_select whose backward adds up a repeated row's gradients in a fixed order; on
        # CUDA only under torch.use_deterministic_algorithms.
        rows = F.embedding(cells, raw).float()
        place = cells % len(grid.centres)
        low, high = assignment.boxes_xyxy[owners].split(2, 1)
        centres = grid.centres[place]
        wanted = torch.cat((centres - low, high - centres), 1) / grid.strides[place]
        found = self._head.distances(rows)
        box = (weights * (1 - complete_iou(_cxcywh(found), _cxcywh(wanted)))).sum()
        if self._head.reg_max > 1:
            off = _distribution_loss(rows.unflatten(1, (4, -1)), wanted)
        else:
            off = (found - wanted).abs()
        dfl = (weights * off.mean(1)).sum()
        return torch.stack([gain * part for gain, part in zip(self._gains, (box, cls, dfl), strict=True)])


def _units(found: Sequence[_Branch]) -> Tensor:
    """Σ t of each kind of branches in units of 1 / UNIT, int64 (1 or 2,)."""
    return torch.stack([(branch.matches.targets * UNIT).round().long().sum() for branch in found])


def _cxcywh(distances: Tensor) -> Tensor:
    """Distances left, top, right, bottom (S, 4) to boxes (S, 4) about the cell's centre."""
    low, high = distances.split(2, 1)
    return torch.cat(((high - low) / 2, high + low), 1)


def _distribution_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of the two bins next to the wanted distance, (S, 4), of logits (S, 4, R).

    A distance outside the bins is trained as the nearest that they can express.
    """
    reg_max = logits.shape[2]
    wanted = wanted.clamp(0, reg_max - 1 - LARGEST_BIN_SHARE)
    bins = torch.arange(reg_max, device=logits.device)
    shares = (1 - (bins - wanted[..., None]).abs()).clamp(min=0)
    return -(logits.log_softmax(2) * shares).sum(2)


class _SoftCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy, summed over all cells and classes, against targets that are 0 but for a few.

    BCE(x, t) = softplus(x) − x t, and its gradient σ(x) − t. Left to autograd, the two terms would fill a dense
    gradient each (43 MB for 16 images at 640 pixels and 80 classes), to be added up afterwards.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cells: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
        """(N, C), and (S,) where the targets are, which are added up; float32 ()."""
        ctx.save_for_backward(logits, cells, classes, targets)
        return F.softplus(logits.float()).sum() - (logits[cells, classes].float() * targets).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits, in their dtype."""
        logits, cells, classes, targets = ctx.saved_tensors
        dense = logits.float().sigmoid().contiguous()
        flat, place = dense.view(-1), cells * logits.shape[1] + classes
        # A place comes twice only where a target is 0, so that σ − t is the least of what is found for it, whatever
        # the order. Subtracting in place would wait: before an index_put_ that accumulates CUDA reads back the indices.
        flat.scatter_reduce_(0, place, flat[place] - targets, "amin")
        return dense.mul_(grad).to(logits.dtype), None, None, None
