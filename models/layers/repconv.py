"""Re-parameterised blocks: several branches in training, one convolution afterwards (Ding et al., RepVGG, 2021)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import C3, SILU, Conv


class RepConv(nn.Module):
    """SiLU of the sum of a 3×3 and a 1×1 convolution, each with its own normalisation; a single 3×3 once folded.

    Args:
        c_in, c_out: channels.
    """

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.cv1 = Conv(c_in, c_out, 3, act=False)
        self.cv2: Conv | None = Conv(c_in, c_out, 1, act=False)
        self.act: nn.Module = SILU

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, H, W) to (B, c_out, H, W)."""
        y = self.cv1(x)
        return cast(Tensor, self.act(y if self.cv2 is None else y + self.cv2(x)))

    @torch.no_grad()
    def fold_batch_norm(self, dtype: torch.dtype = torch.float64) -> None:
        """Fold both branches into the 3×3 convolution: a 1×1 kernel is the centre of a 3×3 one with zeros around it.

        Nothing happens the second time.

        Args:
            dtype: to compute in, as of `Conv.fold_batch_norm`.
        """
        if self.cv2 is None:
            return
        self.cv1.take_folded(*self._folded(dtype))
        self.cv2 = None

    def _folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one convolution."""
        three, bias = self.cv1.folded(dtype)
        if self.cv2 is None:
            return three, bias
        one, other = self.cv2.folded(dtype)
        return three + F.pad(one, (1, 1, 1, 1)), bias + other


class RepBottleneck(nn.Module):
    """`RepConv`, then a 3×3 convolution, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = RepConv(channels, channels)
        self.cv2 = Conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        return x + cast(Tensor, self.cv2(self.cv1(x)))


class RepC3(C3):
    """`C3` with re-parameterised bottlenecks, which always add their input; the arguments are those of `C3`."""

    @staticmethod
    def deep_branch(channels: int, repeats: int, shortcut: bool, groups: int) -> nn.Module:
        """Re-parameterised bottlenecks."""
        return nn.Sequential(*(RepBottleneck(channels) for _ in range(repeats)))
