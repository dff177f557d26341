"""A head of three levels, predictions and targets, for the tests of the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tessera.models.heads.anchor import Detect
from tessera.utils.boxes import cxcywh_to_xyxy

ANCHORS_PX = [[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]], [[116, 90], [156, 198], [373, 326]]]
SIZE_HW = (64, 96)


def grid_anchors() -> Tensor:
    return torch.tensor(ANCHORS_PX, dtype=torch.float32) / torch.tensor([8.0, 16.0, 32.0])[:, None, None]


def Head(nc: int = 5, strides: tuple[int, ...] = (8, 16, 32)) -> Detect:
    """A head of three levels with the anchors above."""
    flat = [[side for pair in level for side in pair] for level in ANCHORS_PX]
    return Detect(nc, flat, channels=(1, 1, 1), strides=strides)


def raw_predictions(batch_size: int, size_hw: tuple[int, int], nc: int, seed: int = 0) -> list[Tensor]:
    """Views of channels-last memory, as a convolution of such a model gives them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch_size, size_hw[0] // s, size_hw[1] // s, 3, 5 + nc, generator=generator)
        .permute(0, 3, 1, 2, 4)
        .requires_grad_()
        for s in (8, 16, 32)
    ]


def random_targets(count: int, batch_size: int, size_hw: tuple[int, int], nc: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    height, width = size_hw
    centre = rng.uniform(0, (width, height), (count, 2))
    half = rng.uniform(2, 80, (count, 2))
    low, high = np.clip(centre - half, 0, (width, height)), np.clip(centre + half, 0, (width, height))
    image, label = rng.integers(0, batch_size, (count, 1)), rng.integers(0, nc, (count, 1))
    return torch.tensor(np.concatenate((image, label, low, high), 1), dtype=torch.float32)


def reference_targets(shared: Path) -> Tensor:
    rows = torch.from_numpy(np.load(shared / "reference" / "loss.npz")["targets"])
    return torch.cat((rows[:, :2], cxcywh_to_xyxy(rows[:, 2:] * 256)), 1)
