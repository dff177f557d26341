"""The training loss of YOLOX's head under the task-aligned assignment of models/heads/free.

Legend: B images, A cells of an image, S slots of all objects (see models/heads/free/aligned.py), C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.models.heads.free.aligned import AlignedLoss, Slots, class_losses, take_rows
from tessera.models.heads.free.cross_entropy import SoftCrossEntropy
from tessera.models.heads.free.grid import Grid
from tessera.models.heads.yolox.layers import LARGEST_LOG, YoloxLayers
from tessera.utils.boxes import complete_iou, cxcywh_to_xyxy, xyxy_to_cxcywh
from tessera.utils.config import Hyp

# Centres are trained no further from the cell than so many strides. What lies beyond overlaps nothing, and its square
# would not be finite.
FARTHEST = 2.0**20


class YoloxLoss(AlignedLoss):
    """Box, objectness and class loss of YOLOX's head, in float32 whatever the model computes in.

    A prediction's score is σ(objectness) · σ(class), in the assignment too. Its target score t is u, the largest IoU of
    the cells of its object, times r, how well it is aligned with it relative to the best of these. Over the matched
    cells: box = Σ t (1 − CIoU) of the decoded boxes, in strides; class = Σ t · binary cross-entropy over the classes,
    against u for the object's and 0 for others, times the weight of the object's class. Over all cells: objectness =
    Σ binary cross-entropy against r of a matched cell, 0 elsewhere; other cells in an ignored region have none. All are
    divided by Σ t of the whole batch.

    So objectness says which cells find an object, and the class how well the object is found. That is near to what the
    original's weights mean, whose objectness is 1 for every match and whose class target is the IoU of the cell's own
    box: there matches are few, and all of them good. Of the ten of this assignment some hardly overlap their object.

    Predictions are offsets (B, A, 4), objectness (B, A, 1) and classes (B, A, C).
    """

    _head: YoloxLayers

    def __init__(
        self, head: YoloxLayers, hyp: Hyp, *, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> None:
        """Prepare the loss.

        Args:
            head: the model's last module.
            hyp: hyperparameters; box, obj, cls, topk, alpha and beta are read.
            label_smoothing: has no effect; a warning says so.
            class_weights: as of Criterion.
        """
        gains = {"box": hyp.box, "obj": hyp.obj, "cls": hyp.cls}
        super().__init__(head, hyp, gains, (4, 1, head.nc), label_smoothing, class_weights)

    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        return cxcywh_to_xyxy(self._head.boxes(_bounded(raw), grid))

    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        _, objectness, logits = outputs
        return objectness[cells, 0].float().sigmoid() * logits[cells, classes].float().sigmoid()

    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> tuple[Tensor, ...]:
        offsets, objectness, logits = outputs
        shares = slots.targets / slots.largest.clamp(min=torch.finfo(torch.float32).tiny)
        obj = SoftCrossEntropy.apply(objectness, slots.cells, torch.zeros_like(slots.classes), shares, slots.ignored)

        xy, log_wh = _bounded(take_rows(offsets, slots.cells)).split(2, 1)
        corners = (slots.centres - slots.strides / 2).repeat(1, 2)
        wanted = xyxy_to_cxcywh((slots.boxes_xyxy - corners) / slots.strides)
        iou = complete_iou(torch.cat((xy, log_wh.exp()), 1), wanted)
        box = (slots.targets * (1 - iou)).sum()

        classes = self.weighted(class_losses(logits, slots, slots.largest), slots.classes)
        cls = (slots.targets * classes).sum()
        return box, obj, cls


def _bounded(offsets: Tensor) -> Tensor:
    """Offsets (…, 4) as float32 whose boxes have finite squares."""
    xy, log_wh = offsets.float().split(2, -1)
    return torch.cat((xy.clamp(-FARTHEST, FARTHEST), log_wh.clamp(max=LARGEST_LOG)), -1)
