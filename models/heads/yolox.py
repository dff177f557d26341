"""YOLOX's detection head (Ge et al., arXiv 2107.08430): layers, decoding and loss, with task-aligned assignment.

Legend: B images, L levels, A cells of an image over all levels, C classes, S slots (see task_aligned.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.models.heads.criterion import LossSettings, gather_rows
from tessera.models.heads.free import START_STD, DetectFree
from tessera.models.heads.grid import Grid, cells_last, make_grid
from tessera.models.heads.head import Head, HeadSpec, Output, object_prior
from tessera.models.heads.task_aligned import Slots, SoftCrossEntropy, TaskAlignedLoss, class_losses
from tessera.models.layers.blocks import CONVS, Conv, ConvClass
from tessera.models.layers.yaml_arguments import class_of, one_of, read_arguments
from tessera.utils.boxes import complete_iou, cxcywh_to_xyxy, xyxy_to_cxcywh

START_SIDE = 4.0  # strides
LARGEST_LOG = 16.0  # of a side in strides; squares of larger sides are not finite
FARTHEST = 2.0**20  # of a trained centre from its cell in strides; squares of larger distances are not finite


class DetectYOLOX(Head):
    """`[[…], 1, DetectYOLOX, [nc, conv]]`; the width of all branches is the number of channels of the finest map.

    A box's centre is an offset from the cell's corner in strides; its sides are exponentials in strides. The score is
    objectness · class probability.

    Pretrained weights are mapped to these modules by name, with `level` counted from the finest: `stems.{level}` (Conv
    1×1); `cls.{level}.0`, `cls.{level}.1` (`conv` 3×3), `cls.{level}.2` (nn.Conv2d 1×1 to C); `box.{level}.0`,
    `box.{level}.1` (`conv` 3×3), followed by `offsets.{level}` (nn.Conv2d 1×1 to 4) and `objectness.{level}` (nn.Conv2d
    1×1 to 1).
    """

    has_objectness = True
    recipes = DetectFree.recipes._replace(short=DetectFree.recipes.new)

    def __init__(self, nc: int, channels: Sequence[int], strides: Sequence[float], conv: ConvClass = Conv) -> None:
        super().__init__(nc, strides)
        width = channels[0]
        self.stems = nn.ModuleList(Conv(c, width) for c in channels)
        self.cls = nn.ModuleList(nn.Sequential(*_pair(width, conv), nn.Conv2d(width, nc, 1)) for _ in channels)
        self.box = nn.ModuleList(nn.Sequential(*_pair(width, conv)) for _ in channels)
        self.offsets = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in channels)
        self.objectness = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in channels)
        self._init_from_priors()

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectYOLOX:
        readers = (("nc", one_of("nc")), ("conv", class_of(*CONVS)))
        _, *conv = read_arguments(spec.where, spec.arguments, readers, required=1)
        return cls(spec.nc, spec.channels, spec.strides, *conv)

    def class_layers(self) -> list[str]:
        return [f"cls.{level}.2" for level in range(len(self.cls))]

    @classmethod
    def loss_hyps(cls, nc: int) -> frozenset[str]:
        return frozenset({"box", "obj", "cls", "topk", "alpha", "beta"})

    @torch.no_grad()
    def _init_from_priors(self) -> None:
        """Initialise to the object prior of a new dataset, and to boxes of four strides centred in their cells.

        Boxes of one stride would overlap only small objects enough to be assigned. The class prior is C to 1 against
        each, because classes are trained only on objects.
        """
        for level, stride in enumerate(self.strides):
            last = cast(nn.Conv2d, cast(nn.Sequential, self.cls[level])[-1])
            offsets, objectness = (cast(nn.Conv2d, layers[level]) for layers in (self.offsets, self.objectness))
            for layer in (last, offsets, objectness):
                nn.init.normal_(layer.weight, std=START_STD)
            probability = object_prior(stride)
            cast(Tensor, objectness.bias).fill_(math.log(probability / (1 - probability)))
            cast(Tensor, last.bias).fill_(-math.log(self.nc))
            side = math.log(START_SIDE)
            cast(Tensor, offsets.bias).copy_(torch.tensor([0.5, 0.5, side, side]))

    def forward(self, features: list[Tensor]) -> Output:
        """Return [offsets (B, A, 4), objectness (B, A, 1), classes (B, A, C)] of L maps; the latter two are logits.

        In evaluation mode return (decoded, the same list), decoded float32 (B, A, 5 + C): cx, cy, w, h in pixels,
        objectness, class probabilities.
        """
        stems = [stem(x) for stem, x in zip(self.stems, features, strict=True)]
        boxes = [branch(x) for branch, x in zip(self.box, stems, strict=True)]
        raw = [
            torch.cat([cells_last(layer(x)) for layer, x in zip(layers, maps, strict=True)], 1)
            for layers, maps in ((self.offsets, boxes), (self.objectness, boxes), (self.cls, stems))
        ]
        if self.training:
            return raw
        grid = make_grid([(x.shape[2], x.shape[3]) for x in features], self.strides, features[0])
        return torch.cat((self.boxes(raw[0], grid), *(logits.float().sigmoid() for logits in raw[1:])), -1), raw

    def boxes(self, offsets: Tensor, grid: Grid) -> Tensor:
        """Decode offsets (…, A, 4) to boxes cx, cy, w, h in pixels, float32 (…, A, 4)."""
        xy, wh = offsets.float().split(2, -1)
        # The cell's corner is half a stride before its centre. Both are exact.
        return torch.cat(
            (xy * grid.strides + (grid.centres - grid.strides / 2), wh.clamp(max=LARGEST_LOG).exp() * grid.strides), -1
        )

    def criterion(self, settings: LossSettings) -> YoloxLoss:
        return YoloxLoss(self, settings)


def _pair(width: int, conv: ConvClass) -> tuple[nn.Module, nn.Module]:
    return conv(width, width, 3), conv(width, width, 3)


class YoloxLoss(TaskAlignedLoss):
    """Box, objectness and class loss of YOLOX's head, in float32 for any model dtype.

    A score is σ(objectness) · σ(class), also in the assignment. The target score t of a cell is u · r. Here u is the
    largest IoU of the object's cells, and r is the cell's alignment relative to the best of them. Over the assigned
    cells: box = Σ t (1 − CIoU) of the decoded boxes, in strides; class = Σ t · binary cross-entropy over the classes,
    against u for the object's class and 0 for others, times the class weight. Over all cells: objectness = Σ binary
    cross-entropy against r for assigned cells and 0 elsewhere, without unassigned cells in ignored regions. All are
    divided by Σ t of the global batch.

    Objectness thus says which cells predict an object, and the class score how good the prediction is. The original
    weights are similar: objectness 1 for every match, and the IoU of the cell's own box as class target. Its matches
    are few and all good, whereas some of the ten cells of this assignment hardly overlap their object.

    Where a teacher predicts classes without labels, the objectness target is the highest of its scores, and the class
    targets, with that weight, are its scores relative to the highest.

    Predictions are offsets (B, A, 4), objectness (B, A, 1) and classes (B, A, C).
    """

    _head: DetectYOLOX

    def __init__(self, head: DetectYOLOX, settings: LossSettings) -> None:
        gains = {"box": settings.box, "obj": settings.obj, "cls": settings.cls}
        super().__init__(head, settings, gains, (4, 1, head.nc))

    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        return cxcywh_to_xyxy(self._head.boxes(_bounded(raw), grid))

    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        _, objectness, logits = outputs
        return objectness[cells, 0].float().sigmoid() * logits[cells, classes].float().sigmoid()

    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> tuple[Tensor, ...]:
        offsets, objectness, logits = outputs
        largest = slots.target_scores.view(-1, self._topk[0]).amax(1).repeat_interleave(self._topk[0])  # of the object
        quality = slots.target_scores / largest.clamp(min=torch.finfo(torch.float32).tiny)
        ignored = None if slots.ignored is None else slots.ignored.any(1, keepdim=True)
        taught = None if slots.taught is None else slots.taught.amax(1, keepdim=True)
        of_first = torch.zeros_like(slots.classes)
        obj = SoftCrossEntropy.apply(objectness, slots.cells, of_first, quality, ignored, taught, slots.cell_weights)

        xy, log_wh = _bounded(gather_rows(offsets, slots.cells)).split(2, 1)
        corners = (slots.grid.centres - slots.grid.strides / 2).repeat(1, 2)
        wanted = xyxy_to_cxcywh((slots.boxes_xyxy - corners) / slots.grid.strides)
        iou = complete_iou(torch.cat((xy, log_wh.exp()), 1), wanted)
        box = (slots.weights * (1 - iou)).sum()

        classes = self.weighted(class_losses(logits, slots, largest), slots.classes)
        cls = (slots.target_scores * classes).sum()
        if slots.taught is not None and taught is not None and ignored is not None:
            # Where the teacher predicts an object, its classes relative to the most probable one.
            truth = slots.taught / taught.clamp(min=torch.finfo(torch.float32).tiny)
            weights = taught * ~ignored
            if slots.cell_weights is not None:
                weights = weights * slots.cell_weights
            cls = cls + F.binary_cross_entropy_with_logits(logits.float(), truth, weights, reduction="sum")
        return box, obj, cls


def _bounded(offsets: Tensor) -> Tensor:
    """Return offsets (…, 4) as float32, bounded so that squares of boxes are finite."""
    xy, log_wh = offsets.float().split(2, -1)
    return torch.cat((xy.clamp(-FARTHEST, FARTHEST), log_wh.clamp(max=LARGEST_LOG)), -1)
