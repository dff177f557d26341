"""Oracle of YOLOX's loss: cell by cell, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.models.heads.yolox import DetectYOLOX
from tessera.utils.boxes import complete_iou, cxcywh_to_xyxy, xyxy_to_cxcywh
from tessera.utils.config import Hyp
from tests.models.heads.free_oracle import SIZE_HW, STRIDES, aligned_targets, cells_of, weight_of, weights_around

CellTargets = dict[tuple[int, int], tuple[int, float]]  # (image, cell) to (row of the targets, target score)


def decode(offsets: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Offsets (B, A, 4) to corners in pixels: the centre from the cell's index, sides as exponentials."""
    centres, strides = cells_of(size_hw)
    found = offsets.double()
    centre = (found[..., :2] + (centres / strides[:, None]).floor()) * strides[:, None]
    return cxcywh_to_xyxy(torch.cat((centre, found[..., 2:].exp() * strides[:, None]), 2))


def oracle_targets(predictions: list[Tensor], targets: Tensor, hyp: Hyp, size_hw: tuple[int, int]) -> CellTargets:
    """What each cell is trained for, where a score is objectness times class probability."""
    offsets, objectness, logits = (p.detach().double() for p in predictions)
    return aligned_targets(decode(offsets, size_hw), objectness.sigmoid() * logits.sigmoid(), targets, hyp, size_hw)


def oracle_loss(
    predictions: list[Tensor], targets: Tensor, hyp: Hyp, size_hw: tuple[int, int], class_weights: Sequence[float] = ()
) -> Tensor:
    """Box, objectness and class loss (3,) of a batch."""
    offsets, objectness, logits = predictions
    class_weights = class_weights or [1.0] * logits.shape[2]
    _, strides = cells_of(size_hw)
    found, wanted = decode(offsets, size_hw), targets[:, 2:6].double()
    cell_weights = weights_around(targets, len(offsets), size_hw)
    box = cls = torch.zeros((), dtype=torch.float64)
    truth = torch.zeros(objectness.shape[:2], dtype=torch.float64)
    matches = oracle_targets(predictions, targets, hyp, size_hw)
    for (image, cell), (number, score) in matches.items():
        largest = max(other for row, other in matches.values() if row == number)
        truth[image, cell] = score / largest
        cell_weights[image, cell] = weight_of(targets[number])
        score *= weight_of(targets[number])
        corners = found[image, cell][None] / strides[cell], wanted[number][None] / strides[cell]
        box = box + score * (1 - complete_iou(*map(xyxy_to_cxcywh, corners))[0])
        for label, logit in enumerate(logits[image, cell].double()):
            wanted_class = logit.new_tensor(largest if label == int(targets[number, 1]) else 0)
            weight = class_weights[int(targets[number, 1])]
            cls = cls + score * weight * F.binary_cross_entropy_with_logits(logit, wanted_class)
    obj = F.binary_cross_entropy_with_logits(objectness[..., 0].double(), truth, cell_weights, reduction="sum")
    total = max(sum(score * weight_of(targets[number]) for number, score in matches.values()), 1)
    return torch.stack((hyp.box * box, hyp.obj * obj, hyp.cls * cls)) / total


def made_head(nc: int = 5) -> DetectYOLOX:
    return DetectYOLOX(nc, channels=(8, 8, 8), strides=STRIDES)


def raw_predictions(batch_size: int, nc: int = 5, seed: int = 0) -> list[Tensor]:
    """Boxes of some four strides, objectness and classes, at random."""
    generator = torch.Generator().manual_seed(seed)
    cells = len(cells_of(SIZE_HW)[0])
    noise = torch.randn(batch_size, cells, 5 + nc, generator=generator)
    offsets = torch.cat((noise[..., :2], noise[..., 2:4] * 0.7 + 1.4), 2)
    return [part.contiguous().requires_grad_() for part in (offsets, noise[..., 4:5], noise[..., 5:])]
