"""Re-parameterised blocks: several branches in training, one convolution in inference (Ding et al., RepVGG, 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import C3, SILU, Conv


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
    def bottleneck_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return nn.Sequential(*(RepBottleneck(channels) for _ in range(repeats)))
