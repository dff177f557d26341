"""The layers of YOLOX's head, and how their outputs are decoded (Ge et al., YOLOX, arXiv 2107.08430).

Legend: B images, L levels, A cells of an image over all levels, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tessera.models.heads.free.grid import Grid, cells_last, make_grid
from tessera.models.heads.free.layers import START_STD
from tessera.models.heads.head import Head, Output, object_share
from tessera.models.layers.blocks import Conv

START_SIDE = 4.0  # strides
LARGEST_LOG = 16.0  # of a side in strides: what lies beyond is no size of anything, and its square is not finite


class YoloxLayers(Head):
    """A box, an objectness and class probabilities a cell.

    A box's centre is counted from the cell's corner in strides, its sides are exponentials in strides. Its score is
    objectness · class probability.

    The original's weights are mapped to these modules by name, with `level` counted from the finest:
    `stems.{level}` (Conv 1×1); `cls.{level}.0`, `cls.{level}.1` (Conv 3×3), `cls.{level}.2` (nn.Conv2d 1×1 to C);
    `box.{level}.0`, `box.{level}.1` (Conv 3×3), behind which `offsets.{level}` (nn.Conv2d 1×1 to 4) and
    `objectness.{level}` (nn.Conv2d 1×1 to 1).

    Args:
        nc: classes.
        channels: of the maps that the levels read; those of the first are the channels of all branches.
        strides: pixels a cell of each level.
    """

    has_objectness = True

    def __init__(self, nc: int, channels: Sequence[int], strides: Sequence[float]) -> None:
        super().__init__(nc, strides)
        width = channels[0]
        self.stems = nn.ModuleList(Conv(c, width) for c in channels)
        self.cls = nn.ModuleList(nn.Sequential(*_pair(width), nn.Conv2d(width, nc, 1)) for _ in channels)
        self.box = nn.ModuleList(nn.Sequential(*_pair(width)) for _ in channels)
        self.offsets = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in channels)
        self.objectness = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in channels)
        self._start_from_priors()

    def class_layers(self) -> list[str]:
        """As Head."""
        return [f"cls.{level}.2" for level in range(len(self.cls))]

    @torch.no_grad()
    def _start_from_priors(self) -> None:
        """Start at the odds of a fresh dataset, and at boxes of four strides about the middle of their cell.

        Of boxes of one stride few would overlap an object enough to be trained for it, and of all objects those of a
        stride's size alone. The classes are learnt where there is an object: C odds to 1 against each.
        """
        for level, stride in enumerate(self.strides):
            last = cast(nn.Conv2d, cast(nn.Sequential, self.cls[level])[-1])
            offsets, objectness = (cast(nn.Conv2d, layers[level]) for layers in (self.offsets, self.objectness))
            for layer in (last, offsets, objectness):
                nn.init.normal_(layer.weight, std=START_STD)
            probability = object_share(stride)
            cast(Tensor, objectness.bias).fill_(math.log(probability / (1 - probability)))
            cast(Tensor, last.bias).fill_(-math.log(self.nc))
            side = math.log(START_SIDE)
            cast(Tensor, offsets.bias).copy_(torch.tensor([0.5, 0.5, side, side]))

    def forward(self, features: list[Tensor]) -> Output:
        """Predict from L maps (B, channels, ny, nx).

        Returns:
            In training mode [offsets (B, A, 4), objectness (B, A, 1), classes (B, A, C)] before any decoding, the
            latter two logits. In evaluation mode (decoded, the same list), decoded float32 (B, A, 5 + C): cx, cy, w, h
            in pixels, objectness, class probabilities.
        """
        stems = [stem(x) for stem, x in zip(self.stems, features, strict=True)]
        boxes = [branch(x) for branch, x in zip(self.box, stems, strict=True)]
        raw = [_over_levels(layers, x) for layers, x in ((self.offsets, boxes), (self.objectness, boxes))]
        raw.append(_over_levels(self.cls, stems))
        if self.training:
            return raw
        grid = make_grid([(x.shape[2], x.shape[3]) for x in features], self.strides, features[0].device)
        return torch.cat((self.boxes(raw[0], grid), *(logits.float().sigmoid() for logits in raw[1:])), -1), raw

    def boxes(self, offsets: Tensor, grid: Grid) -> Tensor:
        """Offsets (…, A, 4) to boxes cx, cy, w, h in pixels, float32 (…, A, 4)."""
        xy, wh = offsets.float().split(2, -1)
        # From the cell's corner, half a stride before its centre. Both are exact.
        return torch.cat(
            (xy * grid.strides + (grid.centres - grid.strides / 2), wh.clamp(max=LARGEST_LOG).exp() * grid.strides), -1
        )


def _pair(width: int) -> tuple[Conv, Conv]:
    return Conv(width, width, 3), Conv(width, width, 3)


def _over_levels(layers: nn.ModuleList, maps: Sequence[Tensor]) -> Tensor:
    """What a layer a level makes of its map, (B, A, …)."""
    return torch.cat([cells_last(layer(x)) for layer, x in zip(layers, maps, strict=True)], 1)
