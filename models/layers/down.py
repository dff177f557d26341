"""Halving a map after a 2×2 mean at stride 1 (Wang et al., YOLOv9, arXiv 2402.13616)."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import Conv
from tessera.models.layers.joining import joined


class AConv(nn.Module):
    """The mean, then a 3×3 convolution at stride 2."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = Conv(c_in, c_out, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, 2H, 2W) to (B, c_out, H, W)."""
        return cast(Tensor, self.conv(F.avg_pool2d(x, 2, 1)))


class ADown(nn.Module):
    """The mean, then a 3×3 convolution at stride 2 of one half of the channels, and a 3×3 maximum of the other.

    Args:
        c_in, c_out: channels, both even.

    Raises:
        ValueError: channels without two equal halves.
    """

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        if c_in % 2 or c_out % 2:
            raise ValueError(f"halves of {c_in} and {c_out} channels, expected even numbers")
        self.cv1 = Conv(c_in // 2, c_out // 2, 3, 2)
        self.cv2 = Conv(c_in // 2, c_out // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, 2H, 2W) to (B, c_out, H, W)."""
        first, second = F.avg_pool2d(x, 2, 1).chunk(2, 1)
        return joined((self.cv1(first), self.cv2(F.max_pool2d(second, 3, 2, 1))))
