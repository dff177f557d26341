"""Base of losses with task-aligned assignment (TOOD): assignment, normalisation over all ranks, and sparse BCE.

Losses are sums over this rank's images (see models/heads/criterion.py), over the target scores of the global batch.

Legend: B images, A cells of an image, G objects, K slots of an object (see task_aligned_assigner.py), S = G·K.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.criterion import (
    Criterion,
    LossSettings,
    SumOverRanks,
    gather_rows,
    no_reduction,
    split_targets,
)
from tessera.models.heads.free.task_aligned_assigner import (
    AnchorFreeAssignment,
    Matches,
    assign_candidates,
    assign_topk,
)
from tessera.models.heads.grid import Grid
from tessera.models.heads.head import Head

log = logging.getLogger(__name__)

# Target scores are summed over the ranks as multiples of 1 / UNIT, so that the order does not matter.
UNIT = 2**16

# Outputs of a set of branches, (B·A, …) each, and the assigned cells.
Matched = tuple[tuple[Tensor, ...], Matches]


@dataclass(frozen=True)
class Slots:
    """Targets of the slots of all objects."""

    cells: Tensor  # int64 (S,), image · A + cell
    targets: Tensor  # float32 (S,), 0 = unused slot
    classes: Tensor  # int64 (S,), of the object
    boxes_xyxy: Tensor  # float32 (S, 4), of the object in pixels
    grid: Grid  # of the cells
    ignored: Tensor | None  # bool (B·A,), unassigned cells in an ignored region; None without regions


class TaskAlignedLoss(Criterion[AnchorFreeAssignment]):
    """A loss with task-aligned assignment, in float32 for any model dtype.

    It is divided by Σ t, the target scores of the assigned cells of the global batch. The losses of several sets of
    branches are added.
    """

    def __init__(self, head: Head, settings: LossSettings, gains: Mapping[str, float], widths: Sequence[int]) -> None:
        """Prepare the loss of a head.

        For one set of branches: `gains` of the losses by name, and `widths`, the numbers per cell of each output.
        """
        if settings.label_smoothing:
            log.warning("--label-smoothing has no effect: this head has soft targets already.")
        self.names, self.class_weights = tuple(gains), settings.class_weights
        self._gains, self._widths = tuple(gains.values()), tuple(widths)
        self._topk: tuple[int, ...] = (round(settings.topk),)  # cells per object, for each set of branches
        self._settings, self._head = settings, head

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(name for name, gain in zip(self.names, cycle(self._gains), strict=False) if gain == 0)

    @abstractmethod
    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        """Decode the first output (…, A, numbers) to corners in pixels, float32 (…, A, 4)."""

    @abstractmethod
    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        """Return the probabilities, float32 (P,), of cells and classes, int64 (P,) each, from outputs (B·A, …)."""

    @abstractmethod
    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> Sequence[Tensor]:
        """Return the losses of one set of branches as sums, before their gains, from outputs (B·A, …)."""

    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> AnchorFreeAssignment:
        head, checked = self._head, split_targets(targets, self._head.nc, batch_size)
        return assign_candidates(checked, head.strides, self._topk[0], batch_size, head.grids_hw(size_hw))

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: AnchorFreeAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = no_reduction,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's sums over the target scores of all ranks, from predictions in any float dtype."""
        grid, matched = self._match(predictions, assignment)
        summing = sum_over_ranks(_units(matched))
        sums = self._sums(assignment, grid, matched)
        parts = (sums / (summing().float() / UNIT).clamp(min=1)[:, None]).flatten()
        return parts.sum(), parts.detach()

    def totals(self, predictions: Sequence[Tensor], assignment: AnchorFreeAssignment) -> Tensor:
        """Return float32 (sets of branches, losses + 1): sums of the losses, and of the target scores."""
        grid, matched = self._match(predictions, assignment)
        return torch.cat((self._sums(assignment, grid, matched), _units(matched).float()[:, None] / UNIT), 1)

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        return tuple((totals[:, :-1] / np.maximum(totals[:, -1:], 1)).flatten().tolist())

    def _match(self, predictions: Sequence[Tensor], assignment: AnchorFreeAssignment) -> tuple[Grid, list[Matched]]:
        """Return the cells of the batch's images, and outputs and matches of each set of branches."""
        grid = Grid(assignment.grid)
        widths, shape = self._widths, (assignment.batch_size, len(grid.cells))
        assert len(predictions) == len(widths) * len(self._topk), len(predictions)
        matched = []
        for kind, topk in enumerate(self._topk):
            raw = predictions[kind * len(widths) : (kind + 1) * len(widths)]
            for output, width in zip(raw, widths, strict=True):
                assert output.shape == (*shape, width), output.shape
            outputs = tuple(output.flatten(0, 1) for output in raw)
            boxes = self._boxes_at(raw[0].detach(), grid, assignment)
            scores = functools.partial(self._scores, outputs)
            alpha, beta = self._settings.alpha, self._settings.beta
            matched.append((outputs, assign_topk(boxes, scores, assignment, alpha, beta, topk)))
        return grid, matched

    def _boxes_at(self, raw: Tensor, grid: Grid, assignment: AnchorFreeAssignment) -> Callable[[Tensor], Tensor]:
        """Return a function from cells to boxes of a first output (B, A, …), all decoded if candidates are many."""
        if assignment.pairs < assignment.cells:
            flat = raw.flatten(0, 1)
            return lambda cells: self._boxes(flat[cells], grid.at(cells))
        boxes_xyxy = self._boxes(raw, grid).flatten(0, 1)
        return lambda cells: boxes_xyxy[cells]

    def _sums(self, assignment: AnchorFreeAssignment, grid: Grid, matched: Sequence[Matched]) -> Tensor:
        """Return the losses of each set of branches with their gains, as sums: float32 (sets, losses)."""
        sums = [
            gain * part
            for outputs, matches in matched
            for gain, part in zip(self._gains, self._losses(outputs, _slots(assignment, grid, matches)), strict=True)
        ]
        return torch.stack(sums).view(len(matched), -1)


class SoftCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy, summed over all cells and classes, against sparse targets.

    Ignored cells have neither loss nor gradient, and no target above 0.

    BCE(x, t) = softplus(x) − x t, with gradient σ(x) − t. Autograd would allocate a dense gradient for each term (43 MB
    for 16 images at 640 pixels and 80 classes), and add them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, cells: Tensor, classes: Tensor, targets: Tensor, ignored: Tensor | None
    ) -> Tensor:
        """Return the loss () of logits (N, C), with targets (S,) at (cells, classes), summed, and bool (N,) or None."""
        ctx.save_for_backward(logits, cells, classes, targets, ignored)
        losses = F.softplus(logits.float())
        if ignored is not None:
            losses.masked_fill_(ignored[:, None], 0)
        return losses.sum() - (logits[cells, classes].float() * targets).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the logits, in their dtype."""
        logits, cells, classes, targets, ignored = ctx.saved_tensors
        dense = logits.float().sigmoid().contiguous()
        flat, index = dense.view(-1), torch.add(classes, cells, alpha=logits.shape[1])
        # If a cell and class occur twice, one target is 0, so that the minimum is σ − t in any order. An accumulating
        # index_put_ would synchronise on CUDA.
        flat.scatter_reduce_(0, index, flat[index] - targets, "amin")
        if ignored is not None:
            dense.masked_fill_(ignored[:, None], 0)
        return dense.mul_(grad).to(logits.dtype), None, None, None, None


def class_losses(logits: Tensor, slots: Slots, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy (S,) over the classes at each slot's cell, of logits (B·A, C).

    The target is `targets`, (S,), for the object's class, and 0 for the others.
    """
    rows = gather_rows(logits, slots.cells)
    classes = torch.arange(rows.shape[1], device=rows.device)
    truth = (classes == slots.classes[:, None]) * targets[:, None]
    return F.binary_cross_entropy_with_logits(rows, truth, reduction="none").sum(1)


def _slots(assignment: AnchorFreeAssignment, grid: Grid, matches: Matches) -> Slots:
    cells, topk = matches.cells.flatten(), matches.cells.shape[1]
    targets, ignored = matches.targets.flatten(), assignment.ignored
    if ignored is not None:
        used = torch.zeros(len(ignored), device=ignored.device).scatter_reduce_(0, cells, targets, "amax")
        ignored = ignored & (used == 0)
    return Slots(
        cells,
        targets,
        assignment.classes.repeat_interleave(topk),
        assignment.boxes_xyxy.repeat_interleave(topk, 0),
        grid.at(cells),
        ignored,
    )


def _units(matched: Sequence[Matched]) -> Tensor:
    """Return Σ t of each set of branches in units of 1 / UNIT, int64 (sets,)."""
    return torch.stack([(matches.targets * UNIT).round().long().sum() for _, matches in matched])
