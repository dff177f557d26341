"""The layers of the anchor-based head, one 1×1 convolution a level, and how their outputs are decoded.

Legend: B images, nl levels, na anchors a level, A = Σ na·ny·nx rows, nc classes, no = 5 + nc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tessera.models.heads.head import Head, Output, object_share


class AnchorLayers(Head):
    """One 1×1 convolution a level, and the anchors that its outputs are relative to.

    Args:
        nc: classes.
        anchors: one row of width, height, width, height … in pixels a level; or the number of anchors of each level,
            which then start as squares of 4·stride·2^(i/na) pixels, the sizes of RetinaNet (Lin et al. 2017).
        channels: of the maps that the levels read.
        strides: pixels a cell of each level.

    Attributes:
        anchors: buffer (nl, na, 2), width and height in grid units, that is pixels / stride.
        no, nl, na: numbers a row, levels, anchors a level.
    """

    has_objectness = True
    yaml_tensors = ("anchors",)
    outputs_before_classes = 5

    anchors: Tensor

    def __init__(
        self,
        nc: int,
        anchors: Sequence[Sequence[float]] | int,
        channels: Sequence[int],
        strides: Sequence[float],
    ) -> None:
        super().__init__(nc, strides)
        if isinstance(anchors, int):
            sides = [[4 * stride * 2 ** (i / anchors) for i in range(anchors)] for stride in strides]
            anchors = [[side for side in row for _ in range(2)] for row in sides]
        assert len(anchors) == len(channels) == len(strides), (anchors, channels, strides)
        self.no = nc + 5
        self.nl = len(channels)
        self.na = self.rows_per_cell = len(anchors[0]) // 2
        pixels = torch.tensor(anchors, dtype=torch.float32).view(self.nl, self.na, 2)
        self.register_buffer("anchors", pixels / torch.tensor(self.strides).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, self.no * self.na, 1) for c in channels)
        self._start_from_priors()

    def class_layers(self) -> list[str]:
        """As Head."""
        return [f"m.{level}" for level in range(self.nl)]

    @torch.no_grad()
    def _start_from_priors(self) -> None:
        """Raise the biases to the odds of a fresh dataset, and 0.6 / nc a class."""
        for conv, stride in zip(self.m, self.strides, strict=True):
            bias = cast(Tensor, cast(nn.Conv2d, conv).bias).view(self.na, self.no)
            bias[:, 4] += math.log(object_share(stride))
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))

    def forward(self, features: list[Tensor]) -> Output:
        """Predict from nl maps (B, C, ny, nx).

        Returns:
            In training mode nl raw tensors (B, na, ny, nx, no): views of the convolutions' outputs, logits before any
            decoding. In evaluation mode (decoded, raw), decoded float32 (B, A, no) as `decode` says.
        """
        raw = []
        for conv, x in zip(self.m, features, strict=True):
            y = conv(x)
            b, _, ny, nx = y.shape
            # A view: from channels-last memory the numbers of a row even stay side by side.
            raw.append(y.view(b, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2))
        return raw if self.training else (self.decode(raw), raw)

    def decode(self, raw: Sequence[Tensor]) -> Tensor:
        """Raw outputs to predictions: xy = (2σ − 0.5 + cell)·stride, wh = (2σ)²·anchor, the rest σ.

        In float32 whatever the model's dtype: float16 has steps of a whole pixel from 1024 on.

        Returns:
            float32 (B, A, no): cx, cy, w, h in pixels, objectness, class probabilities; rows level by level, inside a
            level by anchor, then y, then x.
        """
        return torch.cat([self._decode_level(level, y) for level, y in enumerate(raw)], 1)

    def _decode_level(self, level: int, raw: Tensor) -> Tensor:
        ny, nx = raw.shape[2:4]
        rows = torch.arange(ny, device=raw.device, dtype=torch.float32)
        columns = torch.arange(nx, device=raw.device, dtype=torch.float32)
        cells = torch.stack((columns.expand(ny, nx), rows[:, None].expand(ny, nx)), -1)
        stride = self.strides[level]
        anchors = (self.anchors[level].float() * stride).view(self.na, 1, 1, 2)
        xy, wh, scores = raw.float().sigmoid().split((2, 2, self.nc + 1), -1)
        return torch.cat(((xy * 2 - 0.5 + cells) * stride, (wh * 2).square() * anchors, scores), -1).flatten(1, 3)
