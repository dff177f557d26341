"""Oracle of the anchor-based loss in plain loops, one candidate at a time; a head, predictions and targets for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.models.heads.anchor import Detect
from tessera.models.heads.anchor_loss import scaled_gains
from tessera.models.heads.criterion import LossSettings
from tessera.utils.boxes import complete_iou, cxcywh_to_xyxy
from tessera.utils.config import Hyp
from tests.models.heads.free_oracle import weight_of, weights_around

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


def oracle_assignment(targets: Tensor, anchor_t: float, size_hw: tuple[int, int]) -> list[list[tuple[int, ...]]]:
    """Per level, (image, anchor, y, x, target) in the documented order."""
    levels = []
    for level_anchors, stride in zip(grid_anchors().numpy(), (8, 16, 32), strict=True):
        ny, nx = size_hw[0] // stride, size_hw[1] // stride
        found = []
        for dx, dy in ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1)):
            for a, (aw, ah) in enumerate(level_anchors):
                for t, (image, _, x1, y1, x2, y2) in enumerate(targets.numpy()[:, :6]):
                    left, top, w, h = x1 / stride, y1 / stride, (x2 / stride - x1 / stride), (y2 / stride - y1 / stride)
                    x, y = left + w / 2, top + h / 2
                    if not (aw < anchor_t * w and w < anchor_t * aw and ah < anchor_t * h and h < anchor_t * ah):
                        continue
                    cx, cy = min(math.floor(x), nx - 1), min(math.floor(y), ny - 1)
                    near = {
                        (0, 0): True,
                        (-1, 0): x - cx < 0.5,
                        (0, -1): y - cy < 0.5,
                        (1, 0): x - cx > 0.5,
                        (0, 1): y - cy > 0.5,
                    }[dx, dy]
                    if near and 0 <= cx + dx < nx and 0 <= cy + dy < ny:
                        found.append((int(image), a, cy + dy, cx + dx, t))
        levels.append(found)
    return levels


def oracle_loss(
    predictions: list[Tensor],
    targets: Tensor,
    hyp: Hyp,
    nc: int,
    size_hw: tuple[int, int],
    class_weights: Sequence[float] = (),
) -> Tensor:
    """Box, obj, cls, one candidate at a time."""
    class_weights = class_weights or [1.0] * nc
    parts = torch.zeros(3)
    around = weights_around(targets, len(predictions[0]), size_hw)
    around_levels = around.split([p[0, 0, ..., 0].numel() for p in predictions], 1)
    for level, candidates in enumerate(oracle_assignment(targets, hyp.anchor_t, size_hw)):
        p, stride = predictions[level], (8, 16, 32)[level]
        truth = torch.zeros(p.shape[:4])
        cell_weights = around_levels[level].float().view(len(p), 1, *p.shape[2:4]).repeat(1, p.shape[1], 1, 1)
        box, cls, total = [], [], 0.0
        for image, a, y, x, t in candidates:
            row = p[image, a, y, x]
            x1, y1, x2, y2 = targets[t, 2:6] / stride
            weight = weight_of(targets[t])
            total += weight
            wanted = torch.stack(((x1 + x2) / 2 - x, (y1 + y2) / 2 - y, x2 - x1, y2 - y1))
            found = torch.cat((row[:2].sigmoid() * 2 - 0.5, (row[2:4].sigmoid() * 2) ** 2 * grid_anchors()[level, a]))
            iou = complete_iou(found[None], wanted[None])[0]
            box.append((1 - iou) * weight)
            truth[image, a, y, x] = iou.detach().clamp(min=0)
            cell_weights[image, a, y, x] = weight
            one_hot = F.one_hot(targets[t, 1].long(), nc).float()
            loss = F.binary_cross_entropy_with_logits(row[5:], one_hot)
            cls.append(loss * class_weights[int(targets[t, 1])] * weight)
        obj = F.binary_cross_entropy_with_logits(p[..., 4], truth, cell_weights)
        zero = p.sum() * 0
        mean = [torch.stack(part).sum() / max(total, 1) if part else zero for part in (box, cls)]
        parts = parts + torch.stack((mean[0], obj * (4.0, 1.0, 0.4)[level], mean[1]))
    return parts * torch.tensor(scaled_gains(LossSettings.of(hyp, imgsz=96), nc=nc, nl=3))
