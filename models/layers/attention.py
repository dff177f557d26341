"""What makes a deep stage cheap and far-sighted (Wang et al., YOLOv10, arXiv 2405.14458): `PSA` and `SCDown`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from models.layers.blocks import Conv, DWConv, Size

HEAD_CHANNELS = 64  # values of a head, at least; its queries and keys have half as many


def _heads(channels: int) -> int:
    """As many heads as share the channels out evenly, each with `HEAD_CHANNELS` at least; or one."""
    return max(n for n in range(1, max(channels // HEAD_CHANNELS, 1) + 1) if channels % n == 0)


class Attention(nn.Module):
    """Attention of every cell to all cells of its image, in several heads.

    Softmax of the products of queries and keys, over the root of their channels, weighs the values. Where a cell lies
    is learned by a depth-wise 3×3 convolution of the values (Dong et al., CSWin, arXiv 2107.00652), added to what was
    attended to: no size of map is built in.

    Args:
        channels: of a cell, 2 at least.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = _heads(channels)
        keys = self.heads * (channels // self.heads // 2)
        self.widths = (keys, keys, channels)
        self.qkv = Conv(channels, sum(self.widths), 1, act=False)
        self.position = DWConv(channels, channels, 3, act=False)
        self.project = Conv(channels, channels, 1, act=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        q, k, values = self.qkv(x).split(self.widths, 1)
        # (B, heads, channels of a head, cells): views, where the maps are channels-last.
        q, k, v = (part.flatten(2).unflatten(1, (self.heads, -1)) for part in (q, k, values))
        # Written out: the fused kernel wants keys as wide as values, and without it torch computes this in float32.
        weights = (q.mT @ (k * k.shape[2] ** -0.5)).softmax(-1)
        cells = (weights @ v.mT).transpose(1, 2).flatten(2)
        attended = cells.mT.unflatten(2, x.shape[2:])
        return cast(Tensor, self.project(attended + self.position(values)))


class AttentionBlock(nn.Module):
    """`Attention`, then two 1×1 convolutions by way of twice the channels, each added to its input.

    As in the paper normalisation is by batch, so that it folds, and stands behind every convolution.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = Attention(channels)
        self.feed = nn.Sequential(Conv(channels, 2 * channels, 1), Conv(2 * channels, channels, 1, act=False))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        x = x + self.attention(x)
        return cast(Tensor, x + self.feed(x))


class PSA(nn.Module):
    """Partial self-attention: half of the channels through `AttentionBlock`s, half around them, joined.

    Attention takes memory and time in the square of the number of cells: it is for maps of stride 32 or more.

    Args:
        c_in, c_out: channels; c_out is even.
        repeats: attention blocks.

    Raises:
        ValueError: c_out is odd, or too small for queries and keys.
    """

    def __init__(self, c_in: int, c_out: int, repeats: int = 1) -> None:
        super().__init__()
        if c_out % 2 or c_out < 4:
            raise ValueError(
                f"partial attention with {c_out} channels, expected an even number of at least 4: half of them attend"
            )
        self.split = Conv(c_in, c_out, 1)
        self.blocks = nn.Sequential(*(AttentionBlock(c_out // 2) for _ in range(repeats)))
        self.join = Conv(c_out, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, H, W) to (B, c_out, H, W)."""
        around, through = self.split(x).chunk(2, 1)
        return cast(Tensor, self.join(torch.cat((around, self.blocks(through)), 1)))


class SCDown(nn.Module):
    """Channels and size changed one after the other: a 1×1 `Conv`, then a depth-wise one that halves the map.

    The depth-wise convolution has no activation: what reads it begins with a 1×1 convolution, and between the two
    halves of a separable convolution an activation harms (Chollet, Xception, arXiv 1610.02357).

    Args:
        c_in, c_out: channels.
        kernel, stride: of the depth-wise convolution, pixels.
    """

    def __init__(self, c_in: int, c_out: int, kernel: Size = 3, stride: Size = 2) -> None:
        super().__init__()
        self.widen = Conv(c_in, c_out, 1)
        self.shrink = DWConv(c_out, c_out, kernel, stride, act=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, H, W) to (B, c_out, H / stride, W / stride)."""
        return cast(Tensor, self.shrink(self.widen(x)))
