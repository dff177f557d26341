"""The training loss of the anchor-free head: its three terms, under the assignment of aligned.py.

Legend: B images, A cells of an image, S slots of all objects (see aligned.py), R bins, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.models.heads.free.aligned import AlignedLoss, Slots, class_losses, take_rows
from tessera.models.heads.free.cross_entropy import SoftCrossEntropy
from tessera.models.heads.free.grid import Grid
from tessera.models.heads.free.layers import FreeLayers
from tessera.utils.boxes import complete_iou
from tessera.utils.config import Hyp

LARGEST_BIN_SHARE = 0.01  # a distance beyond the last bin is trained as this much less than the last


class FreeLoss(AlignedLoss):
    """Box, class and distance loss of an anchor-free head, in float32 whatever the model computes in.

    Over the matched cells, each weighted by its target score t: box = Σ t (1 − CIoU); distance = Σ t · mean over the
    four sides of the cross-entropy of the two bins next to the true distance (Li et al., Generalized Focal Loss, 2020),
    or with one bin |error| in strides. Over all cells and classes: class = Σ binary cross-entropy against t for the
    object's class of a matched cell, 0 elsewhere; a matched cell's counts by the weight of its object's class, other
    cells in an ignored region have none. All are divided by Σ t of the whole batch.

    Branches that predict each object once have the same three losses, matched with one cell an object, and are added.
    Predictions are raw boxes (B, A, 4 R) and classes (B, A, C) of each kind of branches.
    """

    _head: FreeLayers

    def __init__(
        self, head: FreeLayers, hyp: Hyp, *, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> None:
        """Prepare the loss.

        Args:
            head: the model's last module.
            hyp: hyperparameters; box, cls, dfl, topk, alpha and beta are read.
            label_smoothing: has no effect; a warning says so.
            class_weights: as of Criterion.
        """
        gains = {"box": hyp.box, "cls": hyp.cls, "dfl" if head.reg_max > 1 else "l1": hyp.dfl}
        super().__init__(head, hyp, gains, (4 * head.reg_max, head.nc), label_smoothing, class_weights)
        if head.one_to_one is not None:
            self._most = (*self._most, 1)
            self.names = (*gains, *(f"one_{name}" for name in gains))

    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        return self._head.boxes(raw, grid)

    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        return outputs[1][cells, classes].float().sigmoid()

    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> tuple[Tensor, ...]:
        raw, logits = outputs
        cls = SoftCrossEntropy.apply(logits, slots.cells, slots.classes, slots.targets, slots.ignored)
        if self.class_weights is not None:
            matched = class_losses(logits, slots, slots.targets)
            cls = cls + torch.where(slots.targets > 0, self.weighted(matched, slots.classes) - matched, 0).sum()
        rows = take_rows(raw, slots.cells)
        low, high = slots.boxes_xyxy.split(2, 1)
        wanted = torch.cat((slots.centres - low, high - slots.centres), 1) / slots.strides
        found = self._head.distances(rows)
        box = (slots.targets * (1 - complete_iou(_cxcywh(found), _cxcywh(wanted)))).sum()
        if self._head.reg_max > 1:
            off = _distribution_loss(rows.unflatten(1, (4, -1)), wanted)
        else:
            off = (found - wanted).abs()
        return box, cls, (slots.targets * off.mean(1)).sum()


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
