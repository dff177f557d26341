"""ELAN blocks (Wang et al., arXiv 2211.04800), and YOLOv9's downsampling blocks."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import Conv, concat
from tessera.models.layers.repconv import RepC3


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
