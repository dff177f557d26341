"""Layers of EfficientNet-Lite (Tan and Le, arXiv 1905.11946, without squeeze-and-excitation, with ReLU6).

The ImageNet weights were trained with TensorFlow, which at stride 2 pads only the end of an odd map. Here both sides
are padded. Away from the edges the function is the same, on an image shifted by up to half a cell.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.layers.blocks import Conv


class ReLU6(nn.Module):
    """min(max(x, 0), 6), elementwise; in place, because no preceding layer needs its output for the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x, inplace=True)


class ConvReLU6(Conv):
    """`Conv` with ReLU6 in place of SiLU."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(c_in, c_out, kernel, stride, groups=groups)
        self.act = ReLU6()


class InvertedBottleneck(nn.Module):
    """Expansion, depth-wise convolution, projection; added to the input if size and channels agree.

    (Sandler et al., MobileNetV2, arXiv 1801.04381.) `expansion` is the channels of the depth-wise convolution over
    `c_in`; at 1 there is no expansion layer.
    """

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = c_in * expansion
        self.cv1 = ConvReLU6(c_in, hidden) if expansion > 1 else nn.Identity()
        self.cv2 = ConvReLU6(hidden, hidden, kernel, stride, groups=hidden)
        self.cv3 = Conv(hidden, c_out, act=False)
        self.adds = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
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
