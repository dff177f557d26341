"""Assignment and loss of the anchor-based head: CIoU, objectness and class loss, divided by counts of the global batch.

Predictions play no part in the assignment, so that it runs on the host before the forward. The device gets index
tensors of known length, and the loss never synchronises.

Legend: B images, T targets of a batch, L levels, A anchors of a level, C classes, P positives (of all levels, level by
level), U cells with at least one positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    Taught,
    gather_rows,
    no_reduction,
    split_targets,
)
from tessera.models.heads.grid import joined, region_cells, sets_of_cells, weights_of_cells
from tessera.utils.boxes import complete_iou
from tessera.utils.errors import ConfigError

if TYPE_CHECKING:
    from tessera.models.heads.anchor import Detect

OBJECTNESS = 4  # channel of a prediction: x, y, w, h, objectness, classes
FOCAL_ALPHA = 0.25  # Lin et al., Focal Loss for Dense Object Detection, ICCV 2017
# Steps (x, y) from the centre's cell: none, left, up, right, down. The last write in this order counts.
_STEPS = np.array([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]])


@dataclass(frozen=True)
class AnchorAssignment(Assignment):
    """Positives of one batch.

    A cell here is one prediction: image, anchor, y, x. Positives are ordered by level, then by step (centre, left, up,
    right, down), anchor and target; several may share a cell. `counts` is float32 (L, 2), weights of the positives and
    predictions of each level; `ignored` is (B, rows), in the order of decoded rows, and false for the cells of `cells`;
    `set_of_row` is -1 in ignored regions; `row_weights` are those of the objectness loss of all predictions.
    """

    cells: Tensor  # int64 (4, U), image, anchor, y, x; level by level, each cell once
    last_positives: Tensor  # int64 (U,), positive that sets the objectness target of each cell
    positive_cells: Tensor  # int64 (P,), column of `cells` of each positive
    classes: Tensor  # int64 (P,)
    boxes: Tensor  # float32 (P, 4), cxcywh in grid units, the centre counted from the cell's corner
    anchors: Tensor  # float32 (P, 2), width and height in grid units
    cells_per_level: tuple[int, ...]  # U of each level
    positives_per_level: tuple[int, ...]  # P of each level
    rows_per_level: tuple[int, ...]  # predictions of an image
    weights: Tensor | None = None  # float32 (P,), of the object of each positive; None = 1

    def with_teacher(self, taught: Taught) -> AnchorAssignment:
        """Return the assignment with the scores where the teacher knows all classes without labels, and 0 elsewhere.

        The positives of `counts` include the squares of the objectness targets.
        """
        assert self.set_of_row is not None and self.unlabelled_sets is not None and self.ignored is not None
        rows, sets = self.set_of_row.clamp(min=0), self.unlabelled_sets
        known = sets.any(1) & (sets <= taught.known).all(1)
        scores = taught.probabilities * (sets & known[:, None])[rows]
        found = replace(self, ignored=self.ignored & ~known[rows], taught=taught._replace(probabilities=scores))
        positives = torch.stack([level.sum() for level in found.taught_weights()])
        return replace(found, counts=self.counts + F.pad(positives[:, None], (0, 1)))

    def taught_weights(self) -> tuple[Tensor, ...]:
        """Return the weights of the teacher's boxes and classes, (B, rows, 1) of each level."""
        assert self.taught is not None
        weights = _of_any(self.taught.probabilities).square()
        if self.row_weights is not None:
            weights = weights * self.row_weights[..., None]
        return weights.split(self.rows_per_level, 1)


def assign_targets(
    targets: Targets,
    anchors: NDArray[np.float32],
    strides: Sequence[float],
    anchor_t: float,
    batch_size: int,
    grids_hw: tuple[tuple[int, int], ...],
    unlabelled: Tensor | None = None,
) -> AnchorAssignment:
    """Match targets with anchors and cells on every level.

    An anchor, of float32 (L, A, 2) in grid units of its level, matches a target if the ratio of each side is below
    `anchor_t`. The match counts in the cell of the target's centre and in up to two neighbours within half a cell of
    it, inside of the image. `grids_hw` are sizes of the levels in cells, `unlabelled` is as in `Criterion.assign`.
    """
    levels, each = len(anchors), len(anchors[0])
    found = [
        _positives(targets.objects, level_anchors, np.float32(stride), anchor_t, grid_hw)
        for level_anchors, stride, grid_hw in zip(anchors, strides, grids_hw, strict=True)
    ]
    positives_per_level = tuple(len(places) for places, *_ in found)
    places, owners, boxes, matched = (np.concatenate(parts) for parts in zip(*found, strict=True))
    level = np.repeat(np.arange(levels), positives_per_level)
    flat = np.ravel_multi_index((level, *places.T), (levels, batch_size, each, *np.max(grids_hw, 0)))
    # The first occurrence seen from the end is the last write.
    _, first, positive_cells = np.unique(flat[::-1], return_index=True, return_inverse=True)
    last_positives = len(flat) - 1 - first
    cells = torch.from_numpy(places[last_positives].T.copy())
    cells_per_level = tuple(np.bincount(level[last_positives], minlength=levels).tolist())
    ignored, set_of_row, sets = None, None, None
    if len(targets.regions) or len(targets.unlabelled):
        alone = Targets(targets.regions, targets.regions[:0], targets.regions[:0])
        as_objects = assign_targets(alone, anchors, strides, anchor_t, batch_size, grids_hw)
        matching = as_objects.cells.split(list(as_objects.cells_per_level), 1)
        inside = region_cells(targets.regions, strides, batch_size, grids_hw)
        none = np.zeros((1, 1), np.bool_)
        own_sets = none if unlabelled is None else unlabelled.numpy()
        of_cell, unions = sets_of_cells(targets.unlabelled, own_sets, strides, batch_size, grids_hw)
        rows = []
        for mask, own, would, used in zip(
            inside, of_cell, matching, cells.split(list(cells_per_level), 1), strict=True
        ):
            row = np.repeat(np.where(mask, -1, own)[:, None], each, 1)
            row[tuple(would.numpy())] = -1
            row[tuple(used.numpy())] = 0
            rows.append(row)
        set_of_row, sets = joined(rows), torch.from_numpy(unions)
        ignored = set_of_row != 0
    weights, row_weights, positives = None, None, np.array(positives_per_level)
    if targets.weights is not None:
        around = weights_of_cells(targets.objects, targets.weights, strides, batch_size, grids_hw)
        of_levels = [np.repeat(level_weights[:, None], each, 1) for level_weights in around]
        weights = targets.weights[owners]
        positives = np.bincount(level, weights, levels)
        for number, level_weights in enumerate(of_levels):
            here = last_positives[level[last_positives] == number]
            level_weights[tuple(places[here].T)] = weights[here]
        row_weights = joined(of_levels)
    rows_per_level = tuple(each * ny * nx for ny, nx in grids_hw)
    counts = np.stack((positives, batch_size * np.array(rows_per_level)), 1)
    return AnchorAssignment(
        torch.tensor(counts, dtype=torch.float32),
        cells,
        torch.from_numpy(last_positives),
        torch.from_numpy(positive_cells[::-1].copy()),
        torch.from_numpy(targets.objects[owners, 1].astype(np.int64)),
        torch.from_numpy(boxes),
        torch.from_numpy(matched),
        cells_per_level,
        positives_per_level,
        rows_per_level,
        None if weights is None else torch.from_numpy(weights),
        ignored=ignored,
        row_weights=row_weights,
        set_of_row=set_of_row,
        unlabelled_sets=sets,
    )


def _positives(
    rows: NDArray[np.float32],
    anchors: NDArray[np.float32],
    stride: np.float32,
    anchor_t: float,
    grid_hw: tuple[int, int],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return cells (P, 4), rows, boxes and anchors of the positives of one level, whose anchors are (A, 2)."""
    ny, nx = grid_hw
    corners, limit = rows[:, 2:] / stride, np.float32(anchor_t)
    size = corners[:, 2:] - corners[:, :2]
    boxes = np.hstack((corners[:, :2] + size / 2, size))
    # max(r, 1/r) < limit, without a division that a side of 0 would break
    matches = ((size < limit * anchors[:, None]) & (anchors[:, None] < limit * size)).all(2)
    anchor, target = np.nonzero(matches)

    centre = boxes[target, :2]
    corner = np.clip(np.floor(centre).astype(np.int64), 0, (nx - 1, ny - 1))
    within = centre - corner
    near_low, near_high = within < 0.5, within > 0.5
    reached = (near_low & (corner > 0)).T, (near_high & (corner < (nx - 1, ny - 1))).T
    in_cell = np.concatenate((np.ones((1, len(target)), bool), *reached))
    step, match = np.nonzero(in_cell)
    anchor, target = anchor[match], target[match]
    cell_xy = corner[match] + _STEPS[step]
    image = rows[target, 0].astype(np.int64)
    in_cell_boxes = np.concatenate((boxes[target, :2] - cell_xy.astype(np.float32), boxes[target, 2:]), axis=1)
    return np.stack((image, anchor, cell_xy[:, 1], cell_xy[:, 0]), 1), target, in_cell_boxes, anchors[anchor]


class AnchorLoss(Criterion[AnchorAssignment]):
    """Box, objectness and class loss of an anchor-based head, in float32 for any model dtype.

    Per level: box = mean(1 - CIoU) over the positives. Objectness = mean binary cross-entropy over all predictions
    against the detached CIoU of the cell's last positive, clamped at 0. Class = mean binary cross-entropy over
    positives and classes, if there are several classes, times the class weight. Levels are summed, objectness with the
    weights of `objectness_balance`. Predictions without object in an ignored region, or in one where some class has no
    labels, have an objectness loss of 0. Means over positives are weighted by their objects' weights.

    Where a teacher predicts classes without labels, the objectness target is q, the sum of its scores. Box and class
    loss have its boxes, and its scores relative to q, as further targets. Their weight is q² and counts as positives.
    Without its boxes, those of classes without labels would soon be forgotten. With scores relative to the highest, all
    classes of which it is unsure would have targets near 1.
    """

    names = ("box", "obj", "cls")
    takes_teacher = True

    def __init__(self, head: Detect, settings: LossSettings) -> None:
        """Prepare the loss of a head; later changes of its anchors are followed. Class targets are 1 - ε/2 and ε/2."""
        self.nc, self.class_weights = head.nc, settings.class_weights
        self._settings, self._head = settings, head
        self._anchors = head.anchors.detach().cpu().float().numpy().copy()
        self._anchors_seen = (head.anchors, head.anchors._version)
        box, obj, cls = scaled_gains(settings, nc=head.nc, nl=head.nl)
        weights = torch.tensor([[box, obj * balance, cls / head.nc] for balance in objectness_balance(head.nl)])
        self._weights = {weights.device: weights}  # a copy for each device

    @property
    def unused(self) -> frozenset[str]:
        gains = self._settings.box, self._settings.obj, self._settings.cls * (self.nc > 1)
        return frozenset(name for name, gain in zip(self.names, gains, strict=True) if gain == 0)

    def assign(
        self, targets: Tensor, batch_size: int, size_hw: tuple[int, int], unlabelled: Tensor | None = None
    ) -> AnchorAssignment:
        head, checked = self._head, split_targets(targets, self.nc, batch_size)
        anchors, grids_hw = self._anchors_on_host(), head.grids_hw(size_hw)
        return assign_targets(checked, anchors, head.strides, self._settings.anchor_t, batch_size, grids_hw, unlabelled)

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: AnchorAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = no_reduction,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and parts as Criterion, without `sum_over_ranks`: all counts are known before the forward."""
        counts = assignment.counts if global_counts is None else global_counts
        parts = self._means(self.sums(predictions, assignment), counts)
        return parts.sum(), parts.detach()

    def sums(self, predictions: Sequence[Tensor], assignment: AnchorAssignment) -> Tensor:
        """Return sums of the losses before gains and means: float32 (L, 3), columns box, obj, cls.

        `predictions` are L raw outputs (B, A, ny, nx, 5 + C), in any memory format and float dtype.
        """
        assert [level[0, ..., 0].numel() for level in predictions] == list(assignment.rows_per_level)
        cells_per_level, positives_per_level = list(assignment.cells_per_level), list(assignment.positives_per_level)
        cells = assignment.cells.split(cells_per_level, dim=1)
        # In float32 from here on; autocast lowers none of the operations below.
        objectness, taken = zip(*map(_TakeCells.apply, predictions, cells), strict=True)
        positives = gather_rows(torch.cat(taken), assignment.positive_cells)

        centre = positives[:, :2].sigmoid() * 2 - 0.5
        size = (positives[:, 2:4].sigmoid() * 2).square() * assignment.anchors
        iou = complete_iou(torch.cat((centre, size), 1), assignment.boxes)
        weights = 1.0 if assignment.weights is None else assignment.weights
        box = [part.sum() for part in ((1 - iou) * weights).split(positives_per_level)]

        quality = iou.detach().clamp(min=0).index_select(0, assignment.last_positives).split(cells_per_level)
        rows_per_level = assignment.rows_per_level
        taught = () if assignment.taught is None else assignment.taught.probabilities.split(rows_per_level, 1)
        background = [_of_any(part) for part in taught] or [torch.zeros_like(level) for level in objectness]
        dense = [
            self._binary_loss(logits, _put(q.view_as(logits), at, values), self._settings.obj_pw)
            for logits, q, at, values in zip(objectness, background, cells, quality, strict=True)
        ]
        if assignment.ignored is not None:
            inside = assignment.ignored.split(rows_per_level, 1)
            dense = [level.masked_fill(part.reshape(level.shape), 0) for level, part in zip(dense, inside, strict=True)]
        if assignment.row_weights is not None:
            factors = assignment.row_weights.split(rows_per_level, 1)
            dense = [level * part.reshape(level.shape) for level, part in zip(dense, factors, strict=True)]
        obj = [level.sum() for level in dense]

        if self.nc > 1:
            logits = positives[:, 5:]
            low = self._settings.label_smoothing / 2
            truth = torch.full_like(logits, low).scatter_(1, assignment.classes[:, None], 1 - low)
            per_positive = self._binary_loss(logits, truth, self._settings.cls_pw).sum(1)
            per_positive = self.weighted(per_positive, assignment.classes)
        else:
            per_positive = torch.zeros_like(iou)
        cls = [part.sum() for part in (per_positive * weights).split(positives_per_level)]
        if assignment.taught is not None:
            boxes = assignment.taught.boxes.split(rows_per_level, 1)
            levels = zip(predictions, taught, boxes, assignment.taught_weights(), strict=True)
            for level, (prediction, scores, wanted, weight) in enumerate(levels):
                own = self._head.decode_level(level, prediction[..., :OBJECTNESS])
                distance = 1 - complete_iou(own.flatten(0, 1), wanted.flatten(0, 1))
                box[level] = box[level] + (distance * weight.flatten()).sum()
                if self.nc > 1:
                    logits = prediction[..., OBJECTNESS + 1 :].float().flatten(1, 3)
                    truth = scores / _of_any(scores).clamp(min=torch.finfo(torch.float32).tiny)
                    losses = self._binary_loss(logits, truth, self._settings.cls_pw)
                    cls[level] = cls[level] + (losses * weight).sum()
        return torch.stack((torch.stack(box), torch.stack(obj), torch.stack(cls)), 1)

    def totals(self, predictions: Sequence[Tensor], assignment: AnchorAssignment) -> Tensor:
        """Return float32 (L, 5), columns box, obj, cls, positives, predictions."""
        return torch.cat((self.sums(predictions, assignment), assignment.counts), 1)

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        """Return box, objectness and class loss from a sum of `totals`, (L, 5)."""
        sums_and_counts = torch.from_numpy(totals)
        return tuple(self._means(sums_and_counts[:, :3], sums_and_counts[:, 3:]).tolist())

    def _means(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return parts (3,) of the loss from sums (L, 3) and counts (L, 2); a level without positives gives 0 / 1."""
        if sums.device not in self._weights:
            with torch.inference_mode(False):  # reused in training, even if validation comes first
                self._weights[sums.device] = next(iter(self._weights.values())).to(sums.device)
        positives, cells = counts.to(sums.device).clamp(min=1).unbind(1)
        return (sums * self._weights[sums.device] / torch.stack((positives, cells, positives), 1)).sum(0)

    def _binary_loss(self, logits: Tensor, targets: Tensor, positive_weight: float) -> Tensor:
        """Return the elementwise binary cross-entropy; focal if fl_gamma is not 0."""
        weight = None if positive_weight == 1 else logits.new_full((1,), positive_weight)
        loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        if self._settings.fl_gamma == 0:
            return loss
        probability = logits.sigmoid()
        miss = targets + probability - 2 * targets * probability  # 1 - p_t, of soft targets too
        alpha = targets * FOCAL_ALPHA + (1 - targets) * (1 - FOCAL_ALPHA)
        # At 0 the gradient of a power below 1 is infinite, and a saturated sigmoid makes it NaN.
        return loss * alpha * miss.clamp(min=1e-6) ** self._settings.fl_gamma

    def _anchors_on_host(self) -> NDArray[np.float32]:
        """Return the head's anchors (L, A, 2), copied again only if the buffer was changed or replaced."""
        buffer = self._head.anchors
        seen, version = self._anchors_seen
        if buffer is not seen or buffer._version != version:
            self._anchors = buffer.detach().cpu().float().numpy().copy()
            self._anchors_seen = (buffer, buffer._version)
        return self._anchors


def scaled_gains(settings: LossSettings, *, nc: int, nl: int) -> tuple[float, float, float]:
    """Return gains of box, objectness and class loss for nl levels, nc classes and the training size.

    Those of the settings are for COCO: 3 levels, 80 classes, 640 pixels.
    """
    layers = 3 / nl
    obj = settings.obj * (settings.imgsz / 640) ** 2
    return settings.box * layers, obj * layers, settings.cls * nc / 80 * layers


def objectness_balance(nl: int) -> tuple[float, ...]:
    """Return the weight of each level's objectness loss, finest first; raise ConfigError for more than 5 levels."""
    if nl == 3:
        return 4.0, 1.0, 0.4
    weights = (4.0, 1.0, 0.25, 0.06, 0.02)
    if nl > len(weights):
        raise ConfigError(
            f"model YAML: the Detect layer has {nl} inputs, but the loss has weights for at most {len(weights)}. "
            f"Give Detect fewer inputs."
        )
    return weights[:nl]


def _of_any(scores: Tensor) -> Tensor:
    """Return the probability of an object (B, rows, 1) from those of classes that exclude each other, (B, rows, C)."""
    return scores.sum(2, keepdim=True).clamp(max=1)


def _put(into: Tensor, cells: Tensor, values: Tensor) -> Tensor:
    """Write values (U, …) at cells (4, U), in place.

    Without the check of the indices, for which the host would wait on CUDA under torch.use_deterministic_algorithms.
    """
    return torch._index_put_impl_(into, cells.unbind(0), values, unsafe=True)


class _TakeCells(torch.autograd.Function):
    """Objectness everywhere, and all outputs of some distinct cells, as float32.

    The gradient of a level's output is dense and large (137 MB for 16 images at 640 pixels and 80 classes). Autograd
    would allocate one for each of the two selections, and add them. Here both write into the same.
    """

    @staticmethod
    def forward(ctx: Any, prediction: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Select from (B, A, ny, nx, 5 + C) by int64 (4, U): float32 (B, A, ny, nx) and (U, 5 + C)."""
        ctx.save_for_backward(cells)
        ctx.layout = torch.empty_like(prediction, device="meta")
        # A contiguous copy: it is read several times, and the original's values lie 5 + C apart.
        objectness = prediction[..., OBJECTNESS].to(torch.float32, copy=True)
        return objectness, prediction[cells.unbind(0)].float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_objectness: Tensor, grad_rows: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the prediction, in its dtype and memory layout."""
        (cells,) = ctx.saved_tensors
        grad = torch.zeros_like(ctx.layout, device=cells.device)
        _put(grad, cells, grad_rows.to(grad.dtype))
        grad[..., OBJECTNESS] += grad_objectness
        return grad, None
