"""Task-aligned assignment (Feng et al., TOOD, 2021), and the base of losses with it.

Candidates follow from the labels alone: rectangles of cells, one per object and level. The host describes these, so
that every shape is known. The device lists the pairs of an object and a cell, in parts of limited memory, and selects
the pairs with the best predictions. Nothing synchronises, and the first of equal values wins, so that the result is
deterministic.

Legend: B images, T targets of a batch, G of them with candidates ("objects"), A cells of an image over all levels, N
rectangles, P pairs of an object and a cell, K cells that an object may get, S = G·K slots of all objects, C classes.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.criterion import (
    Assignment,
    Criterion,
    LossSettings,
    SumOverRanks,
    Targets,
    gather_rows,
    no_reduction,
    split_targets,
)
from tessera.models.heads.grid import (
    Grid,
    cells_inside,
    joined,
    kept_grid,
    region_cells,
    sets_of_cells,
    weights_of_cells,
)
from tessera.models.heads.head import Head
from tessera.utils.boxes import box_iou

log = logging.getLogger(__name__)

PAIRS = 2**19  # of a part, before its last object
# Smaller alignments count as 0. With a larger threshold small objects would never be trained: the best initial box of
# 32 pixels has an alignment of at most 1e-12 with an object of 4.
MIN_ALIGNMENT = torch.finfo(torch.float32).tiny
# Target scores are summed over the ranks as multiples of 1 / UNIT, so that the order does not matter.
UNIT = 2**16


@dataclass(frozen=True)
class Part:
    """Some objects with their rectangles."""

    objects: slice
    rectangles: slice
    pairs: int  # P


@dataclass(frozen=True)
class TaskAlignedAssignment(Assignment):
    """Candidates of one batch, sorted by object, level, y, x.

    `counts` is (0,), because the divisor of the loss depends on the predictions. `ignored` is (B·A,).
    """

    # int64 (6, N), one tensor for one copy to the device. Its rows: object; first cell, as image · A + cell; cells per
    # row; cells from a row's end to the next row; pairs of the part in the rectangles before; pairs
    rectangles: Tensor
    classes: Tensor  # int64 (G,)
    boxes_xyxy: Tensor  # float32 (G, 4) in pixels of the batch
    slots: Tensor  # int64 (G, K), indices of each object's first K candidates in its part, padded with the last
    filled: Tensor  # bool (G, K), false for padding
    parts: tuple[Part, ...]  # all objects, in order
    batch_size: int
    grids_hw: tuple[tuple[int, int], ...]  # of the levels
    strides: tuple[float, ...]
    weights: Tensor | None = None  # float32 (G,), of the objects; None = 1

    @property
    def grid(self) -> Grid:
        """All cells of an image, on the assignment's device."""
        return kept_grid(self.grids_hw, self.strides, self.rectangles.device)

    def without_loss(self) -> Tensor | None:
        """Return which predictions have no class loss if they are not assigned: bool (B·A, 1 or C), None = all have."""
        ignored = None if self.ignored is None else self.ignored[:, None]
        if self.set_of_row is None or self.unlabelled_sets is None:
            return ignored
        unlabelled = self.unlabelled_sets[self.set_of_row]
        return unlabelled if ignored is None else unlabelled | ignored

    def pairs_of(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return objects and cells, int64 (P,) each, of the pairs of a part, on the assignment's device."""
        rectangles = self.rectangles[:, part.rectangles]
        rectangle_of_pair = torch.repeat_interleave(rectangles[-1], output_size=part.pairs)
        owners, first_cell, width, gap, pairs_before = rectangles[:-1, rectangle_of_pair]
        offset = torch.arange(part.pairs, device=owners.device) - pairs_before  # in the rectangle, row by row
        return owners, first_cell + offset + offset // width * gap


def assign_candidates(
    targets: Targets,
    strides: Sequence[float],
    topk: int,
    batch_size: int,
    grids_hw: tuple[tuple[int, int], ...],
    unlabelled: Tensor | None = None,
) -> TaskAlignedAssignment:
    """List the cells whose centre lies in an object, on every level; `topk` is K, `grids_hw` are sizes in cells.

    An object outside of the image has none. `unlabelled` is as in `Criterion.assign`.
    """
    objects = targets.objects.astype(np.float64)
    grids = np.array(grids_hw)
    level_starts = np.concatenate(([0], np.cumsum(grids.prod(1))))

    corners_xy, sizes_wh = cells_inside(objects[:, 2:], strides, grids_hw)
    areas = np.maximum(sizes_wh, 0).prod(2)  # (T, L)
    keep = areas.sum(1) > 0
    objects, corners_xy, sizes_wh, areas = objects[keep], corners_xy[keep], sizes_wh[keep], areas[keep]
    weights, row_weights = None, None
    if targets.weights is not None:
        weights = torch.from_numpy(targets.weights[keep])
        around = weights_of_cells(targets.objects, targets.weights, strides, batch_size, grids_hw)
        row_weights = joined(around).flatten()

    owners, level = np.nonzero(areas)  # (N,) each
    corner, width = corners_xy[owners, level], sizes_wh[owners, level, 0]
    first_cell = level_starts[level] + corner[:, 1] * grids[level, 1] + corner[:, 0]
    first_cell += objects[owners, 0].astype(np.int64) * level_starts[-1]
    pairs = areas[owners, level]
    pairs_before = np.cumsum(pairs) - pairs

    length = areas.sum(1)  # pairs of each object
    start = np.cumsum(length) - length
    cuts = [0, *(np.flatnonzero(np.diff(start // PAIRS)) + 1).tolist(), len(objects)]
    parts, slots = [], np.minimum(np.arange(topk), length[:, None] - 1)
    for some in map(slice, cuts[:-1], cuts[1:]):
        slots[some] += (start[some] - start[some][:1])[:, None]
        its_rectangles = slice(*np.searchsorted(owners, (some.start, some.stop)).tolist())
        pairs_before[its_rectangles] -= pairs_before[its_rectangles][:1]
        parts.append(Part(some, its_rectangles, int(length[some].sum())))
    rectangles = np.stack((owners, first_cell, width, grids[level, 1] - width, pairs_before, pairs))
    ignored = None
    if len(targets.regions):
        ignored = joined(region_cells(targets.regions, strides, batch_size, grids_hw)).flatten()
    set_of_row, sets = None, None
    if len(targets.unlabelled):
        assert unlabelled is not None
        levels, unions = sets_of_cells(targets.unlabelled, unlabelled.numpy(), strides, batch_size, grids_hw)
        set_of_row, sets = joined(levels).flatten(), torch.from_numpy(unions)
    return TaskAlignedAssignment(
        torch.zeros(0),
        rectangles=torch.from_numpy(rectangles),
        classes=torch.from_numpy(objects[:, 1].astype(np.int64)),
        boxes_xyxy=torch.from_numpy(objects[:, 2:].astype(np.float32)),
        slots=torch.from_numpy(slots),
        filled=torch.from_numpy(np.arange(topk) < length[:, None]),
        parts=tuple(parts),
        batch_size=batch_size,
        grids_hw=grids_hw,
        strides=tuple(strides),
        set_of_row=set_of_row,
        unlabelled_sets=sets,
        weights=weights,
        row_weights=row_weights,
        ignored=ignored,
    )


@dataclass(frozen=True)
class Slots:
    """Assigned cells and target scores of all objects; no cell is used twice."""

    cells: Tensor  # int64 (S,), image · A + cell
    target_scores: Tensor  # float32 (S,), class target; 0 = unused slot
    classes: Tensor  # int64 (S,), of the object
    boxes_xyxy: Tensor  # float32 (S, 4), of the object in pixels
    grid: Grid  # of the cells
    # bool (B·A, 1 or C), predictions of unassigned cells that have no class loss, None = all have; with any of them, an
    # objectness has none either.
    ignored: Tensor | None
    taught: Tensor | None  # float32 (B·A, C), further class targets, of a teacher; None without
    cell_weights: Tensor | None  # float32 (B·A, 1), factors of the losses of cells; None = 1

    @cached_property
    def weights(self) -> Tensor:
        """Weights of the boxes, float32 (S,): target score times the weight of the object."""
        scores = self.target_scores
        return scores if self.cell_weights is None else scores * self.cell_weights[self.cells, 0]


@torch.no_grad()
def assign_topk(
    boxes: Callable[[Tensor], Tensor],
    scores: Callable[[Tensor, Tensor], Tensor],
    assignment: TaskAlignedAssignment,
    settings: LossSettings,
    topk: int,
) -> Slots:
    """Assign to each object the cells that predict it best.

    The alignment of a prediction with an object is t = s^α · u^β, of the probability s of the object's class and the
    IoU u. An object gets its K candidates with the largest t; a cell of several objects goes to that with the largest
    u, times its weight. The target score is t, scaled so that an object's largest one is the largest u of its cells.

    Args:
        boxes: predicted boxes of cells, int64 (P,): float32 (P, 4), corners in pixels.
        scores: predicted probabilities of cells and classes, int64 (P,) each: float32 (P,).
        assignment: the candidates, on the same device.
        settings: α and β.
        topk: K, at most as many as the assignment has slots.
    """
    best = []
    for part in assignment.parts:
        owners, cells = assignment.pairs_of(part)
        overlap = box_iou(boxes(cells), assignment.boxes_xyxy[owners])
        alignment = scores(cells, assignment.classes[owners]) ** settings.alpha * overlap**settings.beta
        order = alignment.argsort(stable=True, descending=True)
        order = order[owners[order].argsort(stable=True)]  # by object, then alignment
        first = order[assignment.slots[part.objects, :topk]]
        best.append((cells[first], overlap[first], alignment[first]))
    cells, overlap, alignment = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*best, strict=True))
    keep = assignment.filled[:, :topk] & (alignment > MIN_ALIGNMENT)
    grid = assignment.grid
    predictions = assignment.batch_size * len(grid.cells)
    claim = overlap if assignment.weights is None else overlap * assignment.weights[:, None]
    keep = keep & _largest_of_cell(cells, torch.where(keep, claim, -1.0), predictions)
    alignment, overlap = torch.where(keep, alignment, 0.0), torch.where(keep, overlap, 0.0)
    largest = alignment.amax(1, keepdim=True).clamp(min=MIN_ALIGNMENT)
    target_scores = (alignment / largest * overlap.amax(1, keepdim=True)).flatten()
    cells, ignored, cell_weights = cells.flatten(), assignment.without_loss(), None

    def of_cells(values: Tensor) -> Tensor:
        return torch.zeros(predictions, device=cells.device).scatter_reduce_(0, cells, values, "amax")

    if ignored is not None:
        ignored = ignored & (of_cells(target_scores) == 0)[:, None]
    if assignment.weights is not None and assignment.row_weights is not None:
        own = of_cells(torch.where(target_scores > 0, assignment.weights.repeat_interleave(topk), 0))
        cell_weights = torch.where(of_cells(target_scores) > 0, own, assignment.row_weights)[:, None]
    taught = None
    if assignment.taught is not None and ignored is not None:
        replaced = ignored & assignment.taught.known
        if assignment.ignored is not None:
            replaced &= ~assignment.ignored[:, None]
        taught = assignment.taught.probabilities.flatten(0, 1).clamp(0, 1) * replaced
        ignored = ignored & ~replaced
    classes, boxes_xyxy = (x.repeat_interleave(topk, 0) for x in (assignment.classes, assignment.boxes_xyxy))
    return Slots(cells, target_scores, classes, boxes_xyxy, grid.at(cells), ignored, taught, cell_weights)


def _largest_of_cell(cells: Tensor, values: Tensor, count: int) -> Tensor:
    """Return whether a value, (G, K), is the largest of its cell, or the first of equal ones: bool (G, K)."""
    largest = values.new_full((count,), -1.0).scatter_reduce_(0, cells.flatten(), values.flatten(), "amax")
    owners = torch.arange(len(cells), device=cells.device)[:, None].expand_as(cells)
    owners = torch.where(values == largest[cells], owners, len(cells))
    first = owners.new_full((count,), len(cells)).scatter_reduce_(0, cells.flatten(), owners.flatten(), "amin")
    return owners == first[cells]


# Outputs of a set of branches, (B·A, …) each, and their assigned cells.
Assigned = tuple[tuple[Tensor, ...], Slots]


class TaskAlignedLoss(Criterion[TaskAlignedAssignment]):
    """A loss with task-aligned assignment, in float32 for any model dtype.

    It is divided by Σ t, the target scores of the assigned cells of the global batch, times the weights of their
    objects. The losses of several sets of branches are added.
    """

    takes_teacher = True

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

    def assign(
        self, targets: Tensor, batch_size: int, size_hw: tuple[int, int], unlabelled: Tensor | None = None
    ) -> TaskAlignedAssignment:
        head, checked = self._head, split_targets(targets, self._head.nc, batch_size)
        return assign_candidates(checked, head.strides, self._topk[0], batch_size, head.grids_hw(size_hw), unlabelled)

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: TaskAlignedAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = no_reduction,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's sums over the target scores of all ranks, from predictions in any float dtype."""
        assigned = self.assign_cells(predictions, assignment)
        summing = sum_over_ranks(_units(assigned))
        sums = self._sums(assigned)
        parts = (sums / (summing().float() / UNIT).clamp(min=1)[:, None]).flatten()
        return parts.sum(), parts.detach()

    def totals(self, predictions: Sequence[Tensor], assignment: TaskAlignedAssignment) -> Tensor:
        """Return float32 (sets of branches, losses + 1): sums of the losses, and of the target scores."""
        assigned = self.assign_cells(predictions, assignment)
        return torch.cat((self._sums(assigned), _units(assigned).float()[:, None] / UNIT), 1)

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        return tuple((totals[:, :-1] / np.maximum(totals[:, -1:], 1)).flatten().tolist())

    def assign_cells(self, predictions: Sequence[Tensor], assignment: TaskAlignedAssignment) -> list[Assigned]:
        """Return outputs and assigned cells of each set of branches.

        A teacher teaches the first alone, because its scores are of many cells for an object.
        """
        grid, widths = assignment.grid, self._widths
        assert len(predictions) == len(widths) * len(self._topk), len(predictions)
        assigned = []
        for branches, topk in enumerate(self._topk):
            raw = predictions[branches * len(widths) : (branches + 1) * len(widths)]
            for output, width in zip(raw, widths, strict=True):
                assert output.shape == (assignment.batch_size, len(grid.cells), width), output.shape
            outputs = tuple(output.flatten(0, 1) for output in raw)
            boxes = self._boxes_at(raw[0].detach(), grid, sum(part.pairs for part in assignment.parts))
            scores = functools.partial(self._scores, outputs)
            own = replace(assignment, taught=None) if branches else assignment
            assigned.append((outputs, assign_topk(boxes, scores, own, self._settings, topk)))
        return assigned

    def _boxes_at(self, raw: Tensor, grid: Grid, pairs: int) -> Callable[[Tensor], Tensor]:
        """Return a function from cells to boxes of a first output (B, A, …), all decoded if the pairs are many."""
        if pairs < raw.shape[0] * raw.shape[1]:
            flat = raw.flatten(0, 1)
            return lambda cells: self._boxes(flat[cells], grid.at(cells))
        boxes_xyxy = self._boxes(raw, grid).flatten(0, 1)
        return lambda cells: boxes_xyxy[cells]

    def _sums(self, assigned: Sequence[Assigned]) -> Tensor:
        """Return the losses of each set of branches with their gains, as sums: float32 (sets, losses)."""
        sums = [
            gain * part
            for outputs, slots in assigned
            for gain, part in zip(self._gains, self._losses(outputs, slots), strict=True)
        ]
        return torch.stack(sums).view(len(assigned), -1)


class SoftCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy, summed over all cells and classes, against sparse targets.

    Ignored predictions have neither loss nor gradient, and no target above 0.

    BCE(x, t) = softplus(x) − x t, with gradient σ(x) − t. Autograd would allocate a dense gradient for each term (43 MB
    for 16 images at 640 pixels and 80 classes), and add them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        cells: Tensor,
        classes: Tensor,
        targets: Tensor,
        ignored: Tensor | None,
        dense: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss () of logits (N, C), with targets (S,) at (cells, classes), summed.

        `ignored` is bool (N, 1 or C), or None; `dense` are further targets (N, C), or None; their entropy is
        subtracted, so that the loss is 0 at them. `weights` are factors (N, 1), or None.
        """
        ctx.save_for_backward(logits, cells, classes, targets, ignored, dense, weights)
        losses = F.softplus(logits.float())
        if dense is not None:
            losses += torch.special.xlogy(dense, dense) + torch.special.xlogy(1 - dense, 1 - dense)
            losses -= logits.float() * dense
        if ignored is not None:
            losses.masked_fill_(ignored, 0)
        if weights is not None:
            losses, targets = losses.mul_(weights), targets * weights[cells, 0]
        return losses.sum() - (logits[cells, classes].float() * targets).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, in their dtype."""
        logits, cells, classes, targets, ignored, further, weights = ctx.saved_tensors
        dense = logits.float().sigmoid().contiguous()
        if further is not None:
            dense -= further
        flat, index = dense.view(-1), cells * logits.shape[1] + classes
        # If a cell and class occur twice, one target is 0, so that the minimum is σ − t in any order. An accumulating
        # index_put_ would synchronise on CUDA.
        flat.scatter_reduce_(0, index, flat[index] - targets, "amin")
        if ignored is not None:
            dense.masked_fill_(ignored, 0)
        if weights is not None:
            dense *= weights
        return dense.mul_(grad).to(logits.dtype), *(None,) * 6


def class_losses(logits: Tensor, slots: Slots, targets: Tensor) -> Tensor:
    """Return the weighted binary cross-entropy (S,) over the classes at each slot's cell, of logits (B·A, C).

    The target is `targets`, (S,), for the object's class, and 0 for the others.
    """
    rows = gather_rows(logits, slots.cells)
    classes = torch.arange(rows.shape[1], device=rows.device)
    truth = (classes == slots.classes[:, None]) * targets[:, None]
    weights = None if slots.cell_weights is None else slots.cell_weights[slots.cells]
    return F.binary_cross_entropy_with_logits(rows, truth, weights, reduction="none").sum(1)


def _units(assigned: Sequence[Assigned]) -> Tensor:
    """Return Σ t of each set of branches in units of 1 / UNIT, int64 (sets,).

    A teacher's scores are squared: those of its objects count, and the low ones of all other cells hardly do.
    """
    units = []
    for _, slots in assigned:
        units.append((slots.weights * UNIT).round().long().sum())
        if slots.taught is not None:
            squares = slots.taught.square()
            if slots.cell_weights is not None:
                squares *= slots.cell_weights
            units[-1] += (squares * UNIT).round().long().sum()
    return torch.stack(units)
