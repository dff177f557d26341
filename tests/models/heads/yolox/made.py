"""A head of three levels and predictions, for the tests of YOLOX's head."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.models.heads.yolox import DetectYOLOX
from tests.models.heads.free.made import SIZE_HW
from tests.models.heads.free.oracle import STRIDES, cells_of


def made_head(nc: int = 5) -> DetectYOLOX:
    return DetectYOLOX(nc, channels=(8, 8, 8), strides=STRIDES)


def raw_predictions(batch_size: int, nc: int = 5, seed: int = 0) -> list[Tensor]:
    """Boxes of some four strides, objectness and classes, at random."""
    generator = torch.Generator().manual_seed(seed)
    cells = len(cells_of(SIZE_HW)[0])
    noise = torch.randn(batch_size, cells, 5 + nc, generator=generator)
    offsets = torch.cat((noise[..., :2], noise[..., 2:4] * 0.7 + 1.4), 2)
    return [part.contiguous().requires_grad_() for part in (offsets, noise[..., 4:5], noise[..., 5:])]
