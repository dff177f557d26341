"""Anchor-free heads, of Tessera and of YOLOv9: layers, decoding, loss terms, optional one-to-one branches.

Legend: B images, L levels, A cells of an image over all levels, R bins of a distance, C classes, S slots of all objects
(see task_aligned.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.heads.criterion import LossSettings, gather_rows
from tessera.models.heads.grid import Grid, arange_like, cells_last, make_grid
from tessera.models.heads.head import Head, HeadSpec, Output, Recipes, object_prior
from tessera.models.heads.task_aligned import Slots, SoftCrossEntropy, TaskAlignedLoss, class_losses
from tessera.models.layers.blocks import Conv
from tessera.models.layers.yaml_arguments import count, flag, one_of, read_arguments, up_to
from tessera.utils.boxes import complete_iou_of_pairs, xyxy_to_cxcywh

log = logging.getLogger(__name__)

MAX_BINS, MAX_DEPTH = 64, 8  # bins of a distance; 3×3 convolutions of a branch
DEFAULTS = [16, 1, False]  # reg_max, depth, end2end
LEAST_WIDTH = 64  # channels of a branch
BIN_FALL = 0.4  # difference of the biases of adjacent bins, for a distance of 2 strides
START_DISTANCE = 2.0  # strides
START_STD = 0.01  # of the last convolutions' weights
LARGEST_BIN_MARGIN = 0.01  # a distance beyond the last bin is clamped to this much less
YOLOV9_GROUPS = 4  # of YOLOv9's box branch: one for each side


class Branches(nn.Module):
    """A stem per level, followed by a box branch and a class branch, ending in convolutions to 4 R and C channels."""

    def __init__(self, stems: Iterable[nn.Module], box: Iterable[nn.Sequential], cls: Iterable[nn.Sequential]) -> None:
        super().__init__()
        self.stems, self.box, self.cls = nn.ModuleList(stems), nn.ModuleList(box), nn.ModuleList(cls)

    @torch.no_grad()
    def init_from_priors(self, nc: int, strides: Sequence[float], reg_max: int) -> None:
        """Initialise to the object prior of a new dataset, and to boxes of four strides.

        Smaller boxes would not overlap an object enough to be assigned to it.
        """
        bins = -BIN_FALL * torch.arange(reg_max) if reg_max > 1 else torch.tensor([START_DISTANCE])
        for box, cls, stride in zip(self.box, self.cls, strides, strict=True):
            probability = object_prior(stride) / nc
            last_box, last_cls = (cast(nn.Conv2d, cast(nn.Sequential, branch)[-1]) for branch in (box, cls))
            for last in (last_box, last_cls):
                nn.init.normal_(last.weight, std=START_STD)
            cast(Tensor, last_cls.bias).fill_(math.log(probability / (1 - probability)))
            cast(Tensor, last_box.bias).copy_(bins.repeat(4))

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return [boxes (B, A, 4 R), classes (B, A, C)] of L maps (B, channels, ny, nx); boxes are logits if R > 1."""
        stems = [stem(x) for stem, x in zip(self.stems, features, strict=True)]
        return [
            torch.cat([cells_last(layer(x)) for layer, x in zip(branch, stems, strict=True)], 1)
            for branch in (self.box, self.cls)
        ]


def default_branches(
    nc: int, channels: Sequence[int], strides: Sequence[float], reg_max: int = 16, depth: int = 1
) -> Branches:
    """Return branches of `depth` 3×3 convolutions behind a 1×1 stem per level, as wide as the finest map."""
    width = max(channels[0], LEAST_WIDTH)

    def branch(c_out: int) -> nn.Sequential:
        return nn.Sequential(*(Conv(width, width, 3) for _ in range(depth)), nn.Conv2d(width, c_out, 1))

    made = Branches(
        [Conv(c, width) for c in channels], [branch(4 * reg_max) for _ in channels], [branch(nc) for _ in channels]
    )
    made.init_from_priors(nc, strides, reg_max)
    return made


class DetectFree(Head):
    """`[[…], 1, DetectFree, [nc, reg_max, depth, end2end]]`; the defaults are 16, 1 and false.

    A box is the four distances from the cell's centre to its sides (Tian et al., FCOS, 2019), in strides. Each is the
    mean of a distribution over 0 … R − 1 (Li et al., Generalized Focal Loss, 2020), or a plain number if R = 1.

    Several cells predict each object. An optional second set of branches learns to predict it once (Wang et al.,
    YOLOv10, arXiv 2405.14458). Its gradient does not reach the maps, so that it does not change the first set.

    Args:
        nc, strides: as of Head.
        reg_max: R.
        one_to_many, one_to_one: the branches, and the second set; None = without.
    """

    recipes = Recipes(
        ("hyp.tessera-long.yaml",),
        ("hyp.tessera-short.yaml",),
        ("hyp.tessera-short.yaml", "optimizer=Muon"),
        ("hyp.tessera-known.yaml",),
        ("hyp.tessera-backbone.yaml",),
    )

    def __init__(
        self, nc: int, strides: Sequence[float], reg_max: int, one_to_many: Branches, one_to_one: Branches | None = None
    ) -> None:
        super().__init__(nc, strides)
        self.reg_max = reg_max
        self.one_to_many: Branches | None = one_to_many
        self.one_to_one = one_to_one

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectFree:
        readers = (("nc", one_of("nc")), ("reg_max", up_to(MAX_BINS)), ("depth", up_to(MAX_DEPTH)), ("end2end", flag))
        given = read_arguments(spec.where, spec.arguments, readers, required=1)[1:]
        reg_max, deep, end2end = given + DEFAULTS[len(given) :]
        sets = [
            default_branches(spec.nc, spec.channels, spec.strides, reg_max, deep) for _ in range(2 if end2end else 1)
        ]
        return cls(spec.nc, spec.strides, reg_max, *sets)

    def class_layers(self) -> list[str]:
        return [
            f"{name}.cls.{level}.{len(cast(nn.Sequential, branch)) - 1}"
            for name, branches in self.named_children()
            if isinstance(branches, Branches)
            for level, branch in enumerate(branches.cls)
        ]

    @classmethod
    def loss_hyps(cls, nc: int) -> frozenset[str]:
        return frozenset({"box", "cls", "dfl", "topk", "alpha", "beta"})

    def strip_for_inference(self, *, end2end: bool) -> None:
        if self.one_to_one is None:
            super().strip_for_inference(end2end=end2end)
        self.needs_nms = not end2end
        if end2end:
            self.one_to_many = None
        else:
            self.one_to_one = None

    def forward(self, features: list[Tensor]) -> Output:
        """Return [boxes, classes] or [boxes, classes, boxes, classes] of L maps (B, channels, ny, nx).

        In evaluation mode return (decoded, the same list), decoded float32 (B, A, 4 + C) from the first set: cx, cy, w,
        h in pixels, class probabilities.
        """
        raw: list[Tensor] = []
        if self.one_to_many is not None:
            raw += self.one_to_many(features)
        if self.one_to_one is not None:
            raw += self.one_to_one([x.detach() for x in features])
        if self.training:
            return raw
        grid = make_grid([(x.shape[2], x.shape[3]) for x in features], self.strides, features[0])
        boxes, logits = raw[:2]
        return torch.cat((xyxy_to_cxcywh(self.boxes(boxes, grid)), logits.float().sigmoid()), -1), raw

    def distances(self, raw: Tensor) -> Tensor:
        """Return distances left, top, right, bottom in strides, float32 (…, 4), of raw boxes (…, 4 R)."""
        if self.reg_max == 1:
            return raw.float()
        # Autocast would compute a matrix product in half precision.
        return (raw.float().unflatten(-1, (4, self.reg_max)).softmax(-1) * arange_like(self.reg_max, raw)).sum(-1)

    def boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        """Decode raw boxes (…, A, 4 R) to boxes_xyxy in pixels, float32 (…, A, 4), with sides of at least 0."""
        low, high = (self.distances(raw) * grid.strides).split(2, -1)
        first, second = grid.centres - low, grid.centres + high
        return torch.cat((first, second if self.reg_max > 1 else torch.maximum(first, second)), -1)

    def criterion(self, settings: LossSettings) -> AnchorFreeLoss:
        return AnchorFreeLoss(self, settings)

    def prepare(
        self, labels_wh: NDArray[np.floating], settings: LossSettings, rng: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Warn of objects that are larger than any box of this head."""
        if self.reg_max == 1 or not len(labels_wh):
            return {}
        largest = 2 * (self.reg_max - 1) * max(self.strides)
        fraction = float((labels_wh.max(1) > largest).mean())
        if fraction:
            needed = int(np.ceil(labels_wh.max() / 2 / max(self.strides))) + 1
            remedy = f"a reg_max of {needed}, or " if needed <= MAX_BINS else ""
            log.warning(
                f"reg_max {self.reg_max}: {fraction:.1%} of the objects are larger than {largest:g} px, the largest "
                f"box of {type(self).__name__}; their boxes will be too small. Use {remedy}a smaller --imgsz."
            )
        return {}


class DetectYOLOv9(DetectFree):
    """`[[…], 1, DetectYOLOv9, [nc, width, reg_max]]`, the head of YOLOv9 (Wang et al., arXiv 2402.13616).

    It differs from `DetectFree` in its branches: no stem, two 3×3 convolutions, and boxes in four groups. `width` is
    the number of channels of the class branches. YOLOv9 derives it from the number of classes, as max(channels of the
    finest map, min(2 · nc, 128)). Here it is explicit: with other classes, only the last layer of the pretrained
    branches is reinitialised. `reg_max` is 16 by default.
    """

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectYOLOv9:
        readers = (("nc", one_of("nc")), ("width", count), ("reg_max", up_to(MAX_BINS)))
        _, width, *rest = read_arguments(spec.where, spec.arguments, readers, required=2)
        (reg_max,) = rest or DEFAULTS[:1]
        box_width = max(-(-(spec.channels[0] // 4) // YOLOV9_GROUPS) * YOLOV9_GROUPS, 4 * reg_max)
        branches = Branches(
            [nn.Identity() for _ in spec.channels],
            [
                nn.Sequential(
                    Conv(c, box_width, 3),
                    Conv(box_width, box_width, 3, groups=YOLOV9_GROUPS),
                    nn.Conv2d(box_width, 4 * reg_max, 1, groups=YOLOV9_GROUPS),
                )
                for c in spec.channels
            ],
            [
                nn.Sequential(Conv(c, width, 3), Conv(width, width, 3), nn.Conv2d(width, spec.nc, 1))
                for c in spec.channels
            ],
        )
        branches.init_from_priors(spec.nc, spec.strides, reg_max)
        return cls(spec.nc, spec.strides, reg_max, branches)


class AnchorFreeLoss(TaskAlignedLoss):
    """Box, class and distance loss of an anchor-free head, in float32 for any model dtype.

    Over the assigned cells, weighted by their target score t: box = Σ t (1 − CIoU). Distance = Σ t · mean over the four
    sides of the cross-entropy of the two bins next to the true distance (Li et al., Generalized Focal Loss, 2020), or
    |error| in strides with one bin. Over all cells and classes: class = Σ binary cross-entropy, against t for the
    object's class of an assigned cell and 0 elsewhere. It is times the class weight for assigned cells, and 0 for other
    cells in an ignored region and for classes that are not labelled there. All are divided by Σ t of the global batch.

    One-to-one branches add the same three losses, with one cell assigned to each object. Predictions are raw boxes
    (B, A, 4 R) and classes (B, A, C) of each set of branches.
    """

    _head: DetectFree

    def __init__(self, head: DetectFree, settings: LossSettings) -> None:
        gains = {"box": settings.box, "cls": settings.cls, "dfl" if head.reg_max > 1 else "l1": settings.dfl}
        super().__init__(head, settings, gains, (4 * head.reg_max, head.nc))
        if head.one_to_one is not None:
            self._topk = (*self._topk, 1)
            self.names = (*gains, *(f"one_{name}" for name in gains))

    def box_loss(self, weights: Tensor, ious: Tensor) -> Tensor:
        """Return the box loss of assigned cells, a scalar, from their weights and CIoU, (S,) each."""
        return (weights * (1 - ious)).sum()

    def _boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        return self._head.boxes(raw, grid)

    def _scores(self, outputs: Sequence[Tensor], cells: Tensor, classes: Tensor) -> Tensor:
        return outputs[1][cells, classes].float().sigmoid()

    def _losses(self, outputs: Sequence[Tensor], slots: Slots) -> tuple[Tensor, ...]:
        raw, logits = outputs
        cls = SoftCrossEntropy.apply(
            logits, slots.cells, slots.classes, slots.target_scores, slots.ignored, slots.taught, slots.cell_weights
        )
        if self.class_weights is not None:
            matched = class_losses(logits, slots, slots.target_scores)
            cls = cls + torch.where(slots.target_scores > 0, self.weighted(matched, slots.classes) - matched, 0).sum()
        rows = gather_rows(raw, slots.cells)
        low, high = slots.boxes_xyxy.split(2, 1)
        wanted = torch.cat((slots.grid.centres - low, high - slots.grid.centres), 1) / slots.grid.strides
        predicted = self._head.distances(rows)
        low, high = torch.stack((predicted, wanted)).split(2, -1)  # boxes around the cell's centre
        box = self.box_loss(slots.weights, complete_iou_of_pairs((high - low) / 2, high + low))
        if self._head.reg_max > 1:
            off = _distribution_loss(rows.unflatten(1, (4, -1)), wanted)
        else:
            off = (predicted - wanted).abs()
        return box, cls, (slots.weights * off.mean(1)).sum()


def _distribution_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross-entropy (S, 4) of the two bins next to the wanted distance, (S, 4), of logits (S, 4, R).

    Distances outside of the bins are clamped.
    """
    reg_max = logits.shape[2]
    wanted = wanted.clamp(0, reg_max - 1 - LARGEST_BIN_MARGIN)
    bins = torch.arange(reg_max, device=logits.device)
    weights = ((bins - wanted[..., None]).abs() - 1).clamp(max=0)  # negative
    return (logits.log_softmax(2) * weights).sum(2)
