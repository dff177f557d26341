"""Variants of `C3`, and their blocks.

Ghost blocks derive half of the channels from the others cheaply (Han et al., GhostNet, 2020). Re-parameterised blocks
have several branches in training, one convolution in inference (Ding et al., RepVGG, 2021). `C3TR` has self-attention
over the cells of a map (Dosovitskiy et al., ViT, 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import C3, SILU, Conv, DWConv, Size, concat

CHEAP_KERNEL = 5  # of the depth-wise convolution that makes the second half
ATTENTION_HEADS = 4


class GhostConv(nn.Module):
    """A `Conv` to half of the channels, and a depth-wise one that derives the other half."""

    def __init__(
        self, c_in: int, c_out: int, kernel: Size = 1, stride: Size = 1, groups: int = 1, act: bool = True
    ) -> None:
        super().__init__()
        if c_out % 2:
            raise ValueError(
                f"a ghost convolution to {c_out} channels, expected an even number: half of them are ghosts"
            )
        half = c_out // 2
        self.cv1 = Conv(c_in, half, kernel, stride, groups=groups, act=act)
        self.cv2 = Conv(half, half, CHEAP_KERNEL, groups=half, act=act)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv1(x)
        return concat((y, self.cv2(y)))


class GhostBottleneck(nn.Module):
    """Two ghost convolutions, added to the input; at stride 2 with downsampling between them.

    `c_in` and `c_out` are equal at stride 1; `kernel` is that of the depth-wise convolutions.
    """

    def __init__(self, c_in: int, c_out: int, kernel: Size = 3, stride: int = 1) -> None:
        super().__init__()
        hidden = c_out // 2
        halves = stride == 2
        self.conv = nn.Sequential(
            GhostConv(c_in, hidden),
            DWConv(hidden, hidden, kernel, stride, act=False) if halves else nn.Identity(),
            GhostConv(hidden, c_out, act=False),
        )
        self.shortcut = (
            nn.Sequential(DWConv(c_in, c_in, kernel, stride, act=False), Conv(c_in, c_out, act=False))
            if halves
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(x) + self.shortcut(x))


class C3Ghost(C3):
    """`C3` with ghost bottlenecks, which always add their input; arguments as of `C3`, without `conv`."""

    @staticmethod
    def deep_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return nn.Sequential(*(GhostBottleneck(channels, channels) for _ in range(repeats)))


class RepConv(nn.Module):
    """SiLU of the sum of a 3×3 and a 1×1 convolution, each with its own normalisation; a single 3×3 when folded."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.cv1 = Conv(c_in, c_out, 3, act=False)
        self.cv2: Conv | None = Conv(c_in, c_out, 1, act=False)
        self.act: nn.Module = SILU

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv1(x)
        return cast(Tensor, self.act(y if self.cv2 is None else y + self.cv2(x)))

    @torch.no_grad()
    def fold_batch_norm(self, dtype: torch.dtype = torch.float64) -> None:
        """Fold both branches into the 3×3 convolution, computed in `dtype`; idempotent.

        A 1×1 kernel is the centre of a 3×3 kernel of zeros.
        """
        if self.cv2 is None:
            return
        weight, bias = self.cv1.folded(dtype)
        weight_1x1, bias_1x1 = self.cv2.folded(dtype)
        self.cv1.set_folded(weight + F.pad(weight_1x1, (1, 1, 1, 1)), bias + bias_1x1)
        self.cv2 = None


class RepBottleneck(nn.Module):
    """`RepConv`, then a 3×3 convolution, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = RepConv(channels, channels)
        self.cv2 = Conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.cv2(self.cv1(x)))


class RepC3(C3):
    """`C3` with re-parameterised bottlenecks, which always add their input; arguments as of `C3`, without `conv`."""

    @staticmethod
    def deep_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return nn.Sequential(*(RepBottleneck(channels) for _ in range(repeats)))


class TransformerLayer(nn.Module):
    """Self-attention, then two linear layers, each added to its input; without normalisation.

    Queries, keys and values pass a linear layer of their own before the projections of the attention, as in the
    checkpoint format. `channels` must be a multiple of `heads`.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"attention over {channels} channels, expected a multiple of its {heads} heads")
        self.q = nn.Linear(channels, channels, bias=False)
        self.k = nn.Linear(channels, channels, bias=False)
        self.v = nn.Linear(channels, channels, bias=False)
        self.ma = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.fc1 = nn.Linear(channels, channels, bias=False)
        self.fc2 = nn.Linear(channels, channels, bias=False)

    def forward(self, cells: Tensor) -> Tensor:
        attended, _ = self.ma(self.q(cells), self.k(cells), self.v(cells), need_weights=False)
        cells = attended + cells
        return cast(Tensor, self.fc2(self.fc1(cells)) + cells)


class TransformerBlock(nn.Module):
    """A linear layer in place of a position embedding, added to the cells, and several `TransformerLayer`s."""

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.tr = nn.Sequential(*(TransformerLayer(channels, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.flatten(2).transpose(1, 2)
        cells = self.tr(cells + self.linear(cells))
        return cells.transpose(1, 2).reshape(x.shape)


class C3TR(C3):
    """`C3` whose deep branch is a `TransformerBlock` of `repeats` layers; arguments as of `C3`, without `conv`.

    Attention takes memory and time in the square of the number of cells, so that it is for the smallest maps.
    """

    @staticmethod
    def deep_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return TransformerBlock(channels, ATTENTION_HEADS, repeats)
