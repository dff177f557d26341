"""Blocks that keep what every stage makes (Wang et al., ELAN, arXiv 2211.04800), and YOLOv9's ways to halve a map."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import Conv, joined
from tessera.models.layers.repconv import RepC3


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, added to the input where `shortcut` is set (He et al., ResNet, 2015)."""

    def __init__(self, channels: int, shortcut: bool = True, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels, 3, groups=groups)
        self.conv2 = Conv(channels, channels, 3, groups=groups)
        self.adds = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape."""
        y = cast(Tensor, self.conv2(self.conv1(x)))
        return x + y if self.adds else y


class Elan(nn.Module):
    """Two parts, the second passed on through a chain of bottlenecks; all parts and every step of the chain joined.

    `C3` joins only the chain's end. Here each bottleneck has a short way to the output, and so a short way back for
    its gradient.

    The arguments are those of `C3`; `expansion` is the channels of a part over `c_out`.
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
        """(B, c_in, H, W) to (B, c_out, H, W)."""
        parts = list(self.split(x).chunk(2, 1))
        for block in self.chain:
            parts.append(block(parts[-1]))
        return cast(Tensor, self.join(joined(parts)))


class _TwoStages(nn.Module):
    """Two halves, the second passed on through two stages; both halves and both stages joined.

    Args:
        c_in, c_out: channels.
        expansion: channels of the two halves together over `c_out`; a stage has as many as a half.

    Attributes:
        cv1, cv4: to the halves, and of all parts.
        stage: channels of a half, and of a stage.
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
        """(B, c_in, H, W) to (B, c_out, H, W)."""
        around, first = self.cv1(x).chunk(2, 1)
        second = self.cv2(first)
        return cast(Tensor, self.cv4(joined((around, first, second, self.cv3(second)))))


class ConvElan(_TwoStages):
    """An ELAN block whose stages are 3×3 convolutions, as in YOLOv9 (Wang et al., arXiv 2402.13616)."""

    def __init__(self, c_in: int, c_out: int, expansion: float = 1.0) -> None:
        super().__init__(c_in, c_out, expansion)
        self.cv2 = Conv(self.stage, self.stage, 3)
        self.cv3 = Conv(self.stage, self.stage, 3)


class RepElan(_TwoStages):
    """An ELAN block whose stages are a `RepC3` and a 3×3 convolution: YOLOv9's generalised ELAN.

    Args:
        c_in, c_out: channels.
        repeats: bottlenecks of each `RepC3`.
        expansion: channels of the two halves together over `c_out`.
    """

    def __init__(self, c_in: int, c_out: int, repeats: int = 1, expansion: float = 1.0) -> None:
        super().__init__(c_in, c_out, expansion)
        c = self.stage
        self.cv2 = nn.Sequential(RepC3(c, c, repeats), Conv(c, c, 3))
        self.cv3 = nn.Sequential(RepC3(c, c, repeats), Conv(c, c, 3))


class AConv(nn.Module):
    """A 2×2 mean at stride 1, then a 3×3 convolution at stride 2 (Wang et al., YOLOv9, arXiv 2402.13616)."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = Conv(c_in, c_out, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, 2H, 2W) to (B, c_out, H, W)."""
        return cast(Tensor, self.conv(F.avg_pool2d(x, 2, 1)))


class ADown(nn.Module):
    """The same mean, then a 3×3 convolution at stride 2 of one half of the channels, and a 3×3 maximum of the other.

    Args:
        c_in, c_out: channels, both even.
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
