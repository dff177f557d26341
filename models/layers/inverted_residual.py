"""The layers of EfficientNet-Lite (Tan and Le, arXiv 1905.11946, without squeeze-and-excitation, with ReLU6).

Their weights were trained on ImageNet with TensorFlow, which pads an odd row and column at the end where a stride of 2
needs them; here both sides are padded. Away from the border that is the same function, seen from a picture that is
shifted by up to half a cell.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import Conv


class ReLU6(nn.Module):
    """min(max(x, 0), 6), elementwise; it overwrites its input, which no layer before it needs for its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, of the shape and dtype of `x`."""
        return F.relu6(x, inplace=True)


class ConvReLU6(Conv):
    """`Conv` with ReLU6 in place of SiLU."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(c_in, c_out, kernel, stride, groups=groups)
        self.act = ReLU6()


class InvertedBottleneck(nn.Module):
    """More channels, a depth-wise convolution, fewer channels; added to the input where size and channels agree.

    (Sandler et al., MobileNetV2, arXiv 1801.04381.) `expansion` is the channels of the depth-wise convolution over
    `c_in`; at 1 it is the first one.
    """

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = c_in * expansion
        self.cv1 = ConvReLU6(c_in, hidden) if expansion > 1 else nn.Identity()
        self.cv2 = ConvReLU6(hidden, hidden, kernel, stride, groups=hidden)
        self.cv3 = Conv(hidden, c_out, act=False)
        self.adds = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, H, W) to (B, c_out, H', W')."""
        y = cast(Tensor, self.cv3(self.cv2(self.cv1(x))))
        return x + y if self.adds else y


class InvertedResidual(nn.Sequential):
    """A stage of `repeats` `InvertedBottleneck`s, of which the first has the stride."""

    def __init__(
        self, c_in: int, c_out: int, repeats: int = 1, kernel: int = 3, stride: int = 1, expansion: int = 6
    ) -> None:
        super().__init__(
            InvertedBottleneck(c_in, c_out, kernel, stride, expansion),
            *(InvertedBottleneck(c_out, c_out, kernel, 1, expansion) for _ in range(repeats - 1)),
        )
