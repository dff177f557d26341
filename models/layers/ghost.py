"""Ghost blocks (Han et al., GhostNet, 2020): half of the channels are derived from the others cheaply."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from tessera.models.layers.blocks import C3, Conv, DWConv, Size, concat

CHEAP_KERNEL = 5  # of the depth-wise convolution that makes the second half


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
    def bottleneck_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return nn.Sequential(*(GhostBottleneck(channels, channels) for _ in range(repeats)))
