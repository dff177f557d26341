"""ELAN blocks (Wang et al., arXiv 2211.04800), re-parameterised blocks, and YOLOv9's downsampling blocks.

Re-parameterised: several branches in training, one convolution in inference (Ding et al., RepVGG, 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import C3, SILU, Conv, concat


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


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, added to the input where `shortcut` is set (He et al., ResNet, 2015)."""

    def __init__(self, channels: int, shortcut: bool = True, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels, 3, groups=groups)
        self.conv2 = Conv(channels, channels, 3, groups=groups)
        self.adds = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, self.conv2(self.conv1(x)))
        return x + y if self.adds else y


class Elan(nn.Module):
    """Two parts, the second followed by a chain of bottlenecks; all parts and bottleneck outputs are concatenated.

    `C3` uses only the end of the chain. Here each bottleneck has a short path to the output, and for its gradient. The
    arguments are those of `C3`; `expansion` is the channels of a part over `c_out`.
    """

    def __init__(
        self, c_in: int, c_out: int, repeats: int = 1, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        if hidden < 1 or hidden % groups:
            raise ValueError(
                f"parts of {hidden} channels ({c_out} by the expansion {expansion:g}), expected a "
                f"positive multiple of {groups}, the groups"
            )
        self.split = Conv(c_in, 2 * hidden, 1)
        self.chain = nn.ModuleList(BasicBlock(hidden, shortcut, groups) for _ in range(repeats))
        self.join = Conv((2 + repeats) * hidden, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, 1))
        for block in self.chain:
            parts.append(block(parts[-1]))
        return cast(Tensor, self.join(concat(parts)))


class _TwoStages(nn.Module):
    """Two halves, the second followed by two stages; halves and stages are concatenated.

    `expansion` is the channels of both halves over `c_out`. `cv1` computes the halves, `cv4` combines all parts, and
    `stage` is the number of channels of a half or a stage.
    """

    cv2: nn.Module
    cv3: nn.Module

    def __init__(self, c_in: int, c_out: int, expansion: float = 1.0) -> None:
        super().__init__()
        parts = int(c_out * expansion)
        if parts < 4 or parts % 4:
            raise ValueError(
                f"halves of {parts} channels ({c_out} by the expansion {expansion:g}), expected a positive multiple "
                "of 4"
            )
        self.stage = parts // 2
        self.cv1 = Conv(c_in, parts, 1)
        self.cv4 = Conv(2 * parts, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        around, first = self.cv1(x).chunk(2, 1)
        second = self.cv2(first)
        return cast(Tensor, self.cv4(concat((around, first, second, self.cv3(second)))))


class ConvElan(_TwoStages):
    """ELAN block with 3×3 convolutions as stages, as in YOLOv9 (Wang et al., arXiv 2402.13616)."""

    def __init__(self, c_in: int, c_out: int, expansion: float = 1.0) -> None:
        super().__init__(c_in, c_out, expansion)
        self.cv2 = Conv(self.stage, self.stage, 3)
        self.cv3 = Conv(self.stage, self.stage, 3)


class RepElan(_TwoStages):
    """YOLOv9's generalised ELAN block: each stage is a `RepC3` of `repeats` bottlenecks and a 3×3 convolution."""

    def __init__(self, c_in: int, c_out: int, repeats: int = 1, expansion: float = 1.0) -> None:
        super().__init__(c_in, c_out, expansion)
        c = self.stage
        self.cv2 = nn.Sequential(RepC3(c, c, repeats), Conv(c, c, 3))
        self.cv3 = nn.Sequential(RepC3(c, c, repeats), Conv(c, c, 3))


class AConv(nn.Module):
    """A 2×2 average at stride 1, then a 3×3 convolution at stride 2 (Wang et al., YOLOv9, arXiv 2402.13616)."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = Conv(c_in, c_out, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(F.avg_pool2d(x, 2, 1)))


class ADown(nn.Module):
    """A 2×2 average, then a stride-2 3×3 convolution of one half of the channels and 3×3 max pooling of the other."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        if c_in % 2 or c_out % 2:
            raise ValueError(f"halves of {c_in} and {c_out} channels, expected even numbers")
        self.cv1 = Conv(c_in // 2, c_out // 2, 3, 2)
        self.cv2 = Conv(c_in // 2, c_out // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, c_in, 2H, 2W) to (B, c_out, H, W); both channel counts are even."""
        first, second = F.avg_pool2d(x, 2, 1).chunk(2, 1)
        return concat((self.cv1(first), self.cv2(F.max_pool2d(second, 3, 2, 1))))
