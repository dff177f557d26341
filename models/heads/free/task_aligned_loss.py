"""What losses under the task-aligned assignment share: who is trained for what, the division, and the sums.

Each is a sum over what this rank holds (see models/heads/criterion.py), over the target scores of the whole batch.

Legend: B images, A cells of an image, G objects, K slots of an object (see assignment.py), S = G·K.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.criterion import Criterion, SumOverRanks, checked_targets, sum_of_one_rank
from tessera.models.heads.free.task_aligned_assigner import FreeAssignment, Matches, align, assign_candidates
from tessera.models.heads.grid import Grid, make_grid
from tessera.models.heads.head import Head
from tessera.utils.config import Hyp

log = logging.getLogger(__name__)

# Targets are added up over the ranks as whole numbers of 1 / UNIT, whose sum depends on no order.
UNIT = 2**16


# What branches of one kind predict, (B·A, …) each, and what the slots of the objects are trained for.
Matched = tuple[tuple[Tensor, ...], Matches]


@dataclass(frozen=True)
class Slots:
    """What the slots of all objects are trained for."""

    cells: Tensor  # int64 (S,), image · A + cell
    targets: Tensor  # float32 (S,), 0 where a slot is not used
    largest: Tensor  # float32 (S,), of all targets of the object
    classes: Tensor  # int64 (S,), of the object
    boxes_xyxy: Tensor  # float32 (S, 4), of the object in pixels
    centres: Tensor  # float32 (S, 2), of the cell in pixels
    strides: Tensor  # float32 (S, 1), pixels a cell
    ignored: Tensor | None  # bool (B·A,), cells in an ignored region that find no object; None without regions


class AlignedLoss(Criterion[FreeAssignment]):
    """A loss under the task-aligned assignment, in float32 whatever the model computes in.

    It is divided by Σ t, the target scores of the whole batch's matched cells. A head with several kinds of branches
    has the same losses for each, which are added.
    """

    def __init__(
        self,
        head: Head,
        hyp: Hyp,
        gains: Mapping[str, float],
        widths: Sequence[int],
        label_smoothing: float,
        class_weights: Tensor | None,
    ) -> None:
        """Prepare the loss of a head, with `hyp`'s topk, alpha and beta.

        Args:
            gains: of the losses of one kind of branches, by their names.
            widths: numbers a cell of each output of one kind of branches.
        """
        if label_smoothing:
            log.warning("--label-smoothing has no effect: the targets of this head are soft already.")
        self.names, self.class_weights = tuple(gains), class_weights
        self._gains, self._widths = tuple(gains.values()), tuple(widths)
        self._most: tuple[int, ...] = (round(hyp.topk),)  # cells an object, for each kind of branches
        self._hyp, self._head = hyp, head

    @abstractmethod
    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        """The boxes that a first output (…, A, numbers) predicts: corners in pixels, float32 (…, A, 4)."""

    @abstractmethod
    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        """What outputs (B·A, …) predict for cells and classes, int64 (P,) each: probabilities, float32 (P,)."""

    @abstractmethod
    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> Sequence[Tensor]:
        """The losses of one kind of branches as sums, before their gains, of outputs (B·A, …)."""

    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> FreeAssignment:
        """As Criterion: which cells could find each object."""
        head, checked = self._head, checked_targets(targets, self._head.nc, batch_size)
        return assign_candidates(checked, head.strides, self._most[0], batch_size, head.grids_hw(size_hw))

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: FreeAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = sum_of_one_rank,
    ) -> tuple[Tensor, Tensor]:
        """As Criterion: this rank's sums over the target scores of all ranks, of predictions in any float dtype."""
        grid, found = self._match(predictions, assignment)
        summing = sum_over_ranks(_units(found))
        sums = self._sums(assignment, grid, found)
        parts = (sums / (summing().float() / UNIT).clamp(min=1)[:, None]).flatten()
        return parts.sum(), parts.detach()

    def totals(self, predictions: Sequence[Tensor], assignment: FreeAssignment) -> Tensor:
        """Float32 (kinds of branches, losses + 1), a row for each: sums of the losses, and of the target scores."""
        grid, found = self._match(predictions, assignment)
        return torch.cat((self._sums(assignment, grid, found), _units(found).float()[:, None] / UNIT), 1)

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        """The losses from a sum of `totals`."""
        return tuple((totals[:, :-1] / np.maximum(totals[:, -1:], 1)).flatten().tolist())

    def _match(self, predictions: Sequence[Tensor], assignment: FreeAssignment) -> tuple[Grid, list[Matched]]:
        """The cells of the batch's images, and what each kind of branches predicts and is trained for."""
        grid = make_grid(assignment.grids_hw, self._head.strides, predictions[0].device)
        widths, shape = self._widths, (assignment.batch_size, len(grid.centres))
        assert len(predictions) == len(widths) * len(self._most), len(predictions)
        found = []
        for kind, most in enumerate(self._most):
            raw = predictions[kind * len(widths) : (kind + 1) * len(widths)]
            for output, width in zip(raw, widths, strict=True):
                assert output.shape == (*shape, width), output.shape
            outputs = tuple(output.flatten(0, 1) for output in raw)
            boxes = self._boxes_at(raw[0].detach(), grid, assignment)
            scores = functools.partial(self._scores, outputs)
            found.append((outputs, align(boxes, scores, assignment, self._hyp.alpha, self._hyp.beta, most)))
        return grid, found

    def _boxes_at(self, raw: Tensor, grid: Grid, assignment: FreeAssignment) -> Callable[[Tensor], Tensor]:
        """The boxes of some cells, of a first output (B, A, …): all are decoded once where candidates are more."""
        if assignment.pairs < assignment.cells:
            flat = raw.flatten(0, 1)
            return lambda cells: self._boxes(flat[cells], grid.at(cells))
        boxes_xyxy = self._boxes(raw, grid).flatten(0, 1)
        return lambda cells: boxes_xyxy[cells]

    def _sums(self, assignment: FreeAssignment, grid: Grid, found: Sequence[Matched]) -> Tensor:
        """The losses of each kind of branches with their gains, as sums: float32 (kinds, losses)."""
        sums = []
        for outputs, matches in found:
            losses = self._losses(outputs, _slots(assignment, grid, matches))
            sums.append(torch.stack([gain * part for gain, part in zip(self._gains, losses, strict=True)]))
        return torch.stack(sums)


def take_rows(outputs: Tensor, cells: Tensor) -> Tensor:
    """The rows of outputs (B·A, …) of some cells (S,), float32 (S, …).

    An embedding is an index_select whose backward adds up a repeated row's gradients in a fixed order; on CUDA only
    under torch.use_deterministic_algorithms.
    """
    return F.embedding(cells, outputs).float()


class SoftCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy, summed over all cells and classes, against targets that are 0 but for a few.

    Ignored cells have neither loss nor gradient; no target above 0 is in one.

    BCE(x, t) = softplus(x) − x t, and its gradient σ(x) − t. Left to autograd, the two terms would fill a dense
    gradient each (43 MB for 16 images at 640 pixels and 80 classes), to be added up afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, cells: Tensor, classes: Tensor, targets: Tensor, ignored: Tensor | None
    ) -> Tensor:
        """(N, C), (S,) where the targets are, which are added up, and bool (N,) or None; float32 ()."""
        ctx.save_for_backward(logits, cells, classes, targets, ignored)
        losses = F.softplus(logits.float())
        if ignored is not None:
            losses.masked_fill_(ignored[:, None], 0)
        return losses.sum() - (logits[cells, classes].float() * targets).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient of the logits, in their dtype."""
        logits, cells, classes, targets, ignored = ctx.saved_tensors
        dense = logits.float().sigmoid().contiguous()
        flat, place = dense.view(-1), cells * logits.shape[1] + classes
        # A place comes twice only where a target is 0, so that σ − t is the least of what is found for it, whatever
        # the order. Subtracting in place would wait: before an index_put_ that accumulates CUDA reads back the indices.
        flat.scatter_reduce_(0, place, flat[place] - targets, "amin")
        if ignored is not None:
            dense.masked_fill_(ignored[:, None], 0)
        return dense.mul_(grad).to(logits.dtype), None, None, None, None


def class_losses(logits: Tensor, slots: Slots, targets: Tensor) -> Tensor:
    """Binary cross-entropy over the classes at each slot's cell, of logits (B·A, C): float32 (S,).

    It is against `targets`, (S,), for the object's class, and 0 for the others.
    """
    rows = take_rows(logits, slots.cells)
    classes = torch.arange(rows.shape[1], device=rows.device)
    truth = (classes == slots.classes[:, None]) * targets[:, None]
    return F.binary_cross_entropy_with_logits(rows, truth, reduction="none").sum(1)


def _slots(assignment: FreeAssignment, grid: Grid, matches: Matches) -> Slots:
    cells = matches.cells.flatten()
    owners = torch.arange(len(matches.cells), device=cells.device).repeat_interleave(
        matches.cells.shape[1], output_size=len(cells)
    )
    targets, ignored, of_slots = matches.targets.flatten(), assignment.ignored, grid.at(cells)
    if ignored is not None:
        used = torch.zeros(len(ignored), device=ignored.device).scatter_reduce_(0, cells, targets, "amax")
        ignored = ignored & (used == 0)
    return Slots(
        cells,
        targets,
        matches.targets.amax(1)[owners],
        assignment.classes[owners],
        assignment.boxes_xyxy[owners],
        of_slots.centres,
        of_slots.strides,
        ignored,
    )


def _units(found: Sequence[Matched]) -> Tensor:
    """Σ t of each kind of branches in units of 1 / UNIT, int64 (kinds,)."""
    return torch.stack([(matches.targets * UNIT).round().long().sum() for _, matches in found])
