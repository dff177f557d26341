"""`[[…], 1, Centre, [nc]]`: every object is learnt by the cell of its centre on every level.

Its two losses are divided by a sum that only the predictions tell (like the target scores of a task-aligned head): each
cell of an object weighs as much as the class probability that it predicts, plus a tenth.

Legend: B images, A cells of all levels, P pairs of an object and a cell, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from models.heads.criterion import Assignment, Criterion, SumOverRanks, alone
from models.heads.head import Head, HeadSpec
from models.layers.arguments import one_of, read_arguments
from utils.boxes import xyxy_to_cxcywh
from utils.config import Hyp


@dataclass(frozen=True)
class CentreAssignment(Assignment):
    """Pairs of an object and a cell: cells int64 (P,) of B·A, classes int64 (P,), boxes cxcywh (P, 4) in cells."""

    cells: Tensor
    classes: Tensor
    boxes: Tensor


class CentreLoss(Criterion[CentreAssignment]):
    """How far the box is off, and how probable the class is."""

    names = ("place", "score")

    def __init__(self, strides: Sequence[float], hyp: Hyp) -> None:
        self.strides, self.gains = strides, torch.tensor([hyp.box, hyp.cls])

    def assign(self, targets: Tensor, batch_size: int, size_hw: tuple[int, int]) -> CentreAssignment:
        grids = [(int(size_hw[0] / s), int(size_hw[1] / s)) for s in self.strides]
        cells_of_image = sum(ny * nx for ny, nx in grids)
        cells, boxes, first = [], [], 0
        for stride, (ny, nx) in zip(self.strides, grids, strict=True):
            box = xyxy_to_cxcywh(targets[:, 2:] / stride)
            x, y = box[:, 0].long().clamp(0, nx - 1), box[:, 1].long().clamp(0, ny - 1)
            cells.append(targets[:, 0].long() * cells_of_image + first + y * nx + x)
            boxes.append(torch.cat((box[:, :2] - torch.stack((x, y), 1), box[:, 2:]), 1))
            first += ny * nx
        classes = targets[:, 1].long().repeat(len(grids))
        return CentreAssignment(torch.zeros(0), torch.cat(cells), classes, torch.cat(boxes))

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: CentreAssignment,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = alone,
    ) -> tuple[Tensor, Tensor]:
        sums, weight = self._sums(predictions, assignment)
        losses = sums * self.gains.to(sums.device) / sum_over_ranks(weight)().clamp(min=1)
        return losses.sum(), losses.detach()

    def totals(self, predictions: Sequence[Tensor], assignment: CentreAssignment) -> Tensor:
        sums, weight = self._sums(predictions, assignment)
        return torch.cat((sums, weight[None]))

    def losses(self, totals: NDArray[np.float64]) -> tuple[float, ...]:
        return tuple((totals[:2] * self.gains.double().numpy() / max(totals[2], 1)).tolist())

    def _sums(self, predictions: Sequence[Tensor], assignment: CentreAssignment) -> tuple[Tensor, Tensor]:
        """Sums (2,) over the cells, and what the mean divides them by, ()."""
        rows = torch.cat([level.flatten(1, 2) for level in predictions], 1).flatten(0, 1).float()
        found = F.embedding(assignment.cells, rows)
        own = found[:, 4:].gather(1, assignment.classes[:, None])[:, 0]
        weight = own.detach().sigmoid() + 0.1
        off = F.smooth_l1_loss(_boxes(found), assignment.boxes, reduction="none").mean(1)
        return torch.stack(((weight * off).sum(), F.softplus(rows[:, 4:]).sum() - (weight * own).sum())), weight.sum()


class Centre(Head):
    """One 1×1 convolution a level: four numbers for the box, one for each class."""

    def __init__(self, nc: int, channels: Sequence[int], strides: Sequence[float]) -> None:
        super().__init__()
        self.nc, self.strides = nc, tuple(strides)
        self.convs = nn.ModuleList(nn.Conv2d(c, 4 + nc, 1) for c in channels)
        for conv in self.convs:
            nn.init.constant_(conv.bias[4:], -4.0)

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> Centre:
        read_arguments(spec.where, spec.arguments, (("nc", one_of("nc")),))
        return cls(spec.nc, spec.channels, spec.strides)

    def criterion(self, hyp: Hyp, *, imgsz: int, label_smoothing: float = 0.0) -> CentreLoss:
        return CentreLoss(self.strides, hyp)

    def forward(self, features: list[Tensor]) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        raw = [conv(x).permute(0, 2, 3, 1) for conv, x in zip(self.convs, features, strict=True)]
        if self.training:
            return raw
        levels = []
        for level, stride in zip(raw, self.strides, strict=True):
            _, ny, nx, _ = level.shape
            y, x = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
            corners = F.pad(torch.stack((x, y), -1), (0, 2)).to(level.device)
            boxes = (_boxes(level.float()) + corners) * stride
            levels.append(torch.cat((boxes, level[..., 4:].float().sigmoid()), -1).flatten(1, 2))
        return torch.cat(levels, 1), raw


def _boxes(rows: Tensor) -> Tensor:
    """Cxcywh (…, 4) in cells from the cell's corner, of raw rows (…, 4 + C)."""
    return torch.cat((rows[..., :2].sigmoid(), rows[..., 2:4].clamp(max=6).exp()), -1)
