"""`--multi-scale`: batches in another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Resize:
    """`--multi-scale`: another size for each batch, the same on every rank.

    Attributes:
        size_of: size in pixels by epoch and global batch; None where the size stays.
        stride: both sides are multiples of it.
    """

    size_of: Callable[[int, int], int] | None
    stride: int

    def __call__(self, images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) and their targets (T, 6) at the size of global batch `batch` of `epoch`."""
        if self.size_of is None:
            return images, targets
        factor = self.size_of(epoch, batch) / max(images.shape[2:])
        height, width = (max(round(side * factor / self.stride), 1) * self.stride for side in images.shape[2:])
        scale_y, scale_x = height / images.shape[2], width / images.shape[3]
        resized = F.interpolate(images, (height, width), mode="bilinear", align_corners=False)
        return resized, targets * torch.tensor((1, 1, scale_x, scale_y, scale_x, scale_y))
