"""The layers of the anchor-free head, and how their outputs are decoded.

Legend: B images, L levels, A cells of an image over all levels, R bins of a distance, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tessera.models.heads.free.grid import Grid, cells_last, make_grid
from tessera.models.heads.head import Head, Output, object_share
from tessera.models.layers.blocks import Conv
from tessera.utils.boxes import xyxy_to_cxcywh

LEAST_WIDTH = 64  # channels of a branch
BIN_FALL = 0.4  # how much less the bias of each bin is than the one before: a distance of 2 strides
START_DISTANCE = 2.0  # strides
START_STD = 0.01  # of the last convolutions' weights


class Branches(nn.Module):
    """A stem a level, then a branch of layers for the boxes and one for the classes.

    Args:
        stems, box, cls: one for each level; the last layers of `box` and `cls` are convolutions to 4 R and C channels.
    """

    def __init__(self, stems: Iterable[nn.Module], box: Iterable[nn.Sequential], cls: Iterable[nn.Sequential]) -> None:
        super().__init__()
        self.stems, self.box, self.cls = nn.ModuleList(stems), nn.ModuleList(box), nn.ModuleList(cls)

    @torch.no_grad()
    def start_from_priors(self, nc: int, strides: Sequence[float], reg_max: int) -> None:
        """Start at the odds of a fresh dataset, and at boxes of four strides, which overlap what they could learn.

        Otherwise no box would be near enough to an object to be trained for it.
        """
        bins = -BIN_FALL * torch.arange(reg_max) if reg_max > 1 else torch.tensor([START_DISTANCE])
        for box, cls, stride in zip(self.box, self.cls, strides, strict=True):
            probability = object_share(stride) / nc
            last_box, last_cls = (cast(nn.Conv2d, cast(nn.Sequential, branch)[-1]) for branch in (box, cls))
            for last in (last_box, last_cls):
                nn.init.normal_(last.weight, std=START_STD)
            cast(Tensor, last_cls.bias).fill_(math.log(probability / (1 - probability)))
            cast(Tensor, last_box.bias).copy_(bins.repeat(4))

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """[boxes (B, A, 4 R), classes (B, A, C)] of L maps (B, channels, ny, nx): logits, or with R = 1 distances."""
        stems = [stem(x) for stem, x in zip(self.stems, features, strict=True)]
        return [
            torch.cat([cells_last(layer(x)) for layer, x in zip(branch, stems, strict=True)], 1)
            for branch in (self.box, self.cls)
        ]


def light_branches(
    nc: int, channels: Sequence[int], strides: Sequence[float], reg_max: int = 16, depth: int = 1
) -> Branches:
    """Branches behind a 1×1 stem a level, as wide as the finest map.

    Args:
        nc: classes.
        channels: of the maps that the levels read.
        strides: pixels a cell of each level.
        reg_max: R.
        depth: 3×3 convolutions of a branch.
    """
    width = max(channels[0], LEAST_WIDTH)
    made = Branches(
        [Conv(c, width) for c in channels],
        [_branch(width, depth, 4 * reg_max) for _ in channels],
        [_branch(width, depth, nc) for _ in channels],
    )
    made.start_from_priors(nc, strides, reg_max)
    return made


class FreeLayers(Head):
    """A box and class probabilities a cell.

    A box is the four distances from the cell's centre to its sides (Tian et al., FCOS, 2019), in strides: each the mean
    of a distribution over 0 … R − 1 (Li et al., Generalized Focal Loss, 2020), or with R = 1 a plain number.

    Several cells predict each object. There may be a second set of branches that learns to predict it once
    (Wang et al., YOLOv10, arXiv 2405.14458); its gradient does not reach the maps, so that the first is as without it.

    Args:
        nc: classes.
        strides: pixels a cell of each level.
        reg_max: R.
        one_to_many: the branches.
        one_to_one: the second set, of the same kind; None = without.

    Attributes:
        reg_max: R.
        one_to_many, one_to_one: the branches; None where they are not there.
    """

    def __init__(
        self, nc: int, strides: Sequence[float], reg_max: int, one_to_many: Branches, one_to_one: Branches | None = None
    ) -> None:
        super().__init__(nc, strides)
        self.reg_max = reg_max
        self.one_to_many: Branches | None = one_to_many
        self.one_to_one = one_to_one

    def class_layers(self) -> list[str]:
        """As Head."""
        return [
            f"{name}.cls.{level}.{len(cast(nn.Sequential, branch)) - 1}"
            for name, branches in self.named_children()
            for level, branch in enumerate(cast(Branches, branches).cls)
        ]

    def keep_inference(self, *, end2end: bool) -> None:
        """As Head."""
        if self.one_to_one is None:
            super().keep_inference(end2end=end2end)
        self.needs_suppression = not end2end
        if end2end:
            self.one_to_many = None
        else:
            self.one_to_one = None

    def forward(self, features: list[Tensor]) -> Output:
        """Predict from L maps (B, channels, ny, nx).

        Returns:
            In training mode the outputs of the branches, [boxes, classes] or [boxes, classes, boxes, classes]. In
            evaluation mode (decoded, the same list), decoded float32 (B, A, 4 + C) from the first branches: cx, cy, w,
            h in pixels, class probabilities.
        """
        raw: list[Tensor] = []
        if self.one_to_many is not None:
            raw += self.one_to_many(features)
        if self.one_to_one is not None:
            raw += self.one_to_one([x.detach() for x in features])
        if self.training:
            return raw
        grid = make_grid([(x.shape[2], x.shape[3]) for x in features], self.strides, features[0].device)
        boxes, logits = raw[:2]
        return torch.cat((xyxy_to_cxcywh(self.boxes(boxes, grid)), logits.float().sigmoid()), -1), raw

    def distances(self, raw: Tensor) -> Tensor:
        """Distances left, top, right, bottom in strides, float32 (…, 4), of raw boxes (…, 4 R)."""
        if self.reg_max == 1:
            return raw.float()
        bins = torch.arange(self.reg_max, device=raw.device, dtype=torch.float32)
        # Not a matrix product, which autocast would do in half precision.
        return (raw.float().unflatten(-1, (4, self.reg_max)).softmax(-1) * bins).sum(-1)

    def boxes(self, raw: Tensor, grid: Grid) -> Tensor:
        """Raw boxes (…, A, 4 R) to boxes_xyxy in pixels, float32 (…, A, 4); sides are 0 at least."""
        low, high = (self.distances(raw) * grid.strides).split(2, -1)
        first, second = grid.centres - low, grid.centres + high
        return torch.cat((first, second if self.reg_max > 1 else torch.maximum(first, second)), -1)


def _branch(width: int, depth: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(*(Conv(width, width, 3) for _ in range(depth)), nn.Conv2d(width, c_out, 1))
