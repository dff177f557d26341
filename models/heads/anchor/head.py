"""Anchor-based head of YOLOv5: anchors of the model YAML, one 1×1 convolution per level, and decoding.

Legend: B images, nl levels, na anchors per level, A = Σ na·ny·nx rows, nc classes, no = 5 + nc.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.heads.anchor.autoanchor import fit_anchors
from tessera.models.heads.anchor.loss import AnchorLoss
from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.grid import arange_like
from tessera.models.heads.head import Head, HeadSpec, Output, object_prior
from tessera.models.layers.yaml_arguments import count, one_of, positive, read_arguments
from tessera.utils.errors import ConfigError
from tessera.utils.text import plural

log = logging.getLogger(__name__)

MAX_ANCHORS = 64  # a level


def read_anchors(value: object) -> list[list[float]] | int:
    """Read anchors in pixels, a row of w, h, w, h … (or of [w, h] pairs) per level; or their number per level."""
    if isinstance(value, int):
        if count(value) > MAX_ANCHORS:
            raise ValueError(f"at most {MAX_ANCHORS} anchors a level")
        return value
    expected = "one row of width, height, width, height … per level, all of one length, or a number of anchors"
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(row, (list, tuple)) for row in value):
        raise ValueError(expected)
    rows: list[list[float]] = []
    for row in value:
        flat = itertools.chain.from_iterable(side if isinstance(side, (list, tuple)) else (side,) for side in row)
        rows.append([positive(side) for side in flat])
    if len({len(row) for row in rows}) != 1 or len(rows[0]) % 2 or not rows[0]:
        raise ValueError(expected)
    return rows


class Detect(Head):
    """`[[…], 1, Detect, [nc, anchors]]` with the YAML key `anchors`: sizes in pixels per level, or a number per level.

    Args:
        nc: number of classes.
        anchors: one row of width, height, width, height … in pixels per level; or the number of anchors per level,
            which start as squares of 4·stride·2^(i/na) pixels, the sizes of RetinaNet (Lin et al. 2017).
        channels: of each level's map.
        strides: pixels per cell of each level.
    """

    has_objectness = True
    yaml_keys = MappingProxyType({"anchors": read_anchors})
    yaml_tensors = ("anchors",)
    outputs_before_classes = 5

    anchors: Tensor  # buffer (nl, na, 2), width and height in grid units (pixels / stride)

    def __init__(
        self, nc: int, anchors: Sequence[Sequence[float]] | int, channels: Sequence[int], strides: Sequence[float]
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
        self._init_from_priors()

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> Detect:
        read_arguments(spec.where, spec.arguments, (("nc", one_of("nc")), ("anchors", one_of("anchors"))))
        anchors = spec.keys["anchors"]
        if not isinstance(anchors, int) and len(anchors) != len(spec.channels):
            raise ConfigError(
                f"{spec.where}: reads {plural(len(spec.channels), 'layer')}, but `anchors` has "
                f"{plural(len(anchors), 'row')}. Give one row per layer."
            )
        return cls(spec.nc, anchors, spec.channels, spec.strides)

    def class_layers(self) -> list[str]:
        return [f"m.{level}" for level in range(self.nl)]

    @torch.no_grad()
    def _init_from_priors(self) -> None:
        """Initialise the biases to the object prior of a new dataset, and 0.6 / nc per class."""
        for conv, stride in zip(self.m, self.strides, strict=True):
            bias = cast(Tensor, cast(nn.Conv2d, conv).bias).view(self.na, self.no)
            bias[:, 4] += math.log(object_prior(stride))
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))

    def forward(self, features: list[Tensor]) -> Output:
        """Return nl raw tensors (B, na, ny, nx, no) of nl maps (B, C, ny, nx): logits, views of the conv outputs.

        In evaluation mode return (decoded, raw), with decoded float32 (B, A, no) as of `decode`.
        """
        raw = []
        for conv, x in zip(self.m, features, strict=True):
            y = conv(x)
            b, _, ny, nx = y.shape
            # A view; in channels-last memory the outputs of a row stay contiguous.
            raw.append(y.view(b, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2))
        return raw if self.training else (self.decode(raw), raw)

    def decode(self, raw: Sequence[Tensor]) -> Tensor:
        """Decode raw outputs: xy = (2σ − 0.5 + cell)·stride, wh = (2σ)²·anchor, the rest σ.

        Computed in float32 for any model dtype, because float16 has steps of a pixel from 1024 on.

        Returns:
            float32 (B, A, no): cx, cy, w, h in pixels, objectness, class probabilities; rows level by level, in a level
            by anchor, then y, then x.
        """
        return torch.cat([self._decode_level(level, y) for level, y in enumerate(raw)], 1)

    def _decode_level(self, level: int, raw: Tensor) -> Tensor:
        ny, nx = raw.shape[2:4]
        rows, columns = arange_like(ny, raw), arange_like(nx, raw)
        cells = torch.stack((columns.expand(ny, nx), rows[:, None].expand(ny, nx)), -1)
        stride = self.strides[level]
        anchors = (self.anchors[level].float() * stride).view(self.na, 1, 1, 2)
        xy, wh, scores = raw.float().sigmoid().split((2, 2, self.nc + 1), -1)
        return torch.cat(((xy * 2 - 0.5 + cells) * stride, (wh * 2).square() * anchors, scores), -1).flatten(1, 3)

    @classmethod
    def loss_hyps(cls, nc: int) -> frozenset[str]:
        of_classes = {"cls", "cls_pw"} if nc > 1 else set()
        return frozenset({"box", "obj", "obj_pw", "anchor_t", "fl_gamma"} | of_classes)

    def criterion(self, settings: LossSettings) -> AnchorLoss:
        return AnchorLoss(self, settings)

    def prepare(
        self, labels_wh: NDArray[np.floating], settings: LossSettings, rng: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the anchors that AutoAnchor chooses for the labels; none without `rng`."""
        if rng is None:
            return {}
        anchors_px, message = fit_anchors(self, labels_wh, settings.anchor_t, rng)
        log.info(message)
        return {"anchors": torch.from_numpy(anchors_px) / torch.tensor(self.strides)[:, None, None]}

    @property
    def priors(self) -> Tensor:
        """Copy of the anchors, float32 (nl, na, 2) in grid units on the CPU."""
        return self.anchors.detach().float().cpu().clone()
