"""Basic blocks of model YAMLs.

Feature maps are (B, C, H, W), channels-last in memory during training. Attribute names (`conv`, `bn`, `cv1`, `m` …) are
part of the checkpoint format: tensors of original YOLOv5 files fit by name and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

Size = int | tuple[int, int]  # a side, or (height, width)

BN_EPS = 1e-3
BN_MOMENTUM = 0.03


class SiLU(nn.Module):
    """x · sigmoid(x), elementwise (Elfwing et al. 2018), in place while no gradients are recorded.

    With gradients, autograd needs the input again, and overwriting would cost a copy.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x, inplace=not torch.is_grad_enabled())


# Stateless, so that all convolutions share one instance.
SILU = SiLU()


def concat(maps: list[Tensor] | tuple[Tensor, ...], dim: int = 1) -> Tensor:
    """Concatenate maps that agree in all dimensions but `dim`."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.cat(maps, dim)
    return cast(Tensor, _Concat.apply(dim, *maps))


class _Concat(torch.autograd.Function):
    """torch.cat with a backward that gives each map a contiguous gradient.

    Torch's backward gives slices of the whole gradient, whose pixels are not adjacent. On a CPU this slows the
    preceding backward several times.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, *maps: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [x.shape[dim] for x in maps]
        return torch.cat(maps, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part.clone() for part in grad.split(ctx.sizes, ctx.dim))


def same_padding(kernel: Size, dilation: int = 1) -> Size:
    """Return the padding that keeps the size of a map at stride 1 with an odd kernel."""
    if isinstance(kernel, int):
        return (dilation * (kernel - 1) + 1) // 2
    height, width = ((dilation * (side - 1) + 1) // 2 for side in kernel)
    return height, width


class Conv2d(nn.Conv2d):
    """nn.Conv2d that trains by `_DepthWise` where autocast is slow on a CPU: depth-wise, with a stride or above 3×3."""

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, self.bias)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution with another weight and bias."""
        is_slow = 1 < self.groups == self.in_channels and (max(self.stride) > 1 or max(self.kernel_size) > 3)
        is_trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        run = _DepthWise.apply if is_slow and is_trained and torch.is_autocast_enabled("cpu") else F.conv2d
        return cast(Tensor, run(x, weight, bias, self.stride, self.padding, self.dilation, self.groups))


class _DepthWise(torch.autograd.Function):
    """F.conv2d of a depth-wise convolution in autocast, with a backward several times as fast on a CPU.

    In bfloat16 oneDNN is slow at the gradient of the weight with more than three columns, which is computed in strips
    of three, and at that of the input with a stride, which is computed in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        y = F.conv2d(x, weight, bias, *geometry)
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))
        ctx.geometry = geometry
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (stride, padding, dilation, groups) = ctx.saved_tensors, ctx.geometry
        dtype = torch.float32 if max(stride) > 1 else x.dtype
        tensors = grad.to(dtype), torch.empty_like(x, dtype=dtype), weight.to(dtype), None
        rest = stride, padding, dilation, False, (0, 0), groups, (True, False, False)
        by_x = torch.ops.aten.convolution_backward(*tensors, *rest)[0]
        strips, width, padded = [], weight.shape[3], F.pad(x, (padding[1], padding[1]))
        for first in range(0, width, 3):
            size = weight[..., first : first + 3].shape
            last = padded.shape[3] - (width - first - size[3]) * dilation[1]
            shifted = padded[..., first * dilation[1] : last]
            strips.append(conv2d_weight(shifted, size, grad, stride, (padding[0], 0), dilation, groups))
        return by_x, torch.cat(strips, 3), grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, *[None] * 4


class BatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d without its own counter of batches: TrainStep increments all counters in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var, momentum = self.running_mean, self.running_var, cast(float, self.momentum)
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


class Upsample(nn.Upsample):
    """nn.Upsample in its input's type; CUDA's autocast computes it, and would concatenate its output, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.dtype == x.dtype else y.to(x.dtype)


class Conv(nn.Module):
    """Convolution without bias, batch normalisation, SiLU.

    With `frozen_statistics`, training also normalises by the running statistics, and does not update them. The
    normalisation then costs no time, because it is folded into the convolution; weight, gain and shift are still
    trained.

    Args:
        c_in, c_out: channels.
        kernel, stride: pixels, one side or (height, width).
        padding: pixels; None = `same_padding`.
        groups: convolution groups; must divide both channels.
        dilation: spacing of the kernel's taps.
        act: False omits the activation.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: Size = 1,
        stride: Size = 1,
        padding: Size | None = None,
        groups: int = 1,
        dilation: int = 1,
        act: bool = True,
    ) -> None:
        super().__init__()
        if padding is None:
            padding = same_padding(kernel, dilation)
        self.conv = Conv2d(c_in, c_out, kernel, stride, padding, dilation, groups, bias=False)
        self.bn: nn.Module = BatchNorm2d(c_out, eps=BN_EPS, momentum=BN_MOMENTUM)
        self.act: nn.Module = SILU if act else nn.Identity()
        self.frozen_statistics = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.frozen_statistics:
            return cast(Tensor, self.act(self.conv.convolve(x, *self.folded(self.conv.weight.dtype))))
        return cast(Tensor, self.act(self.bn(self.conv(x))))

    @torch.no_grad()
    def fold_batch_norm(self, dtype: torch.dtype = torch.float64) -> None:
        """Fold the running statistics into the convolution, computed in `dtype`; idempotent.

        BN(Wx) = γ(Wx − μ)/√(σ² + ε) + β is a convolution with weight Wγ/√(σ² + ε) and bias β − μγ/√(σ² + ε).
        """
        if not isinstance(self.bn, nn.Identity):
            self.set_folded(*self.folded(dtype))

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the convolution with folded normalisation, in `dtype`."""
        bn = self.bn
        if isinstance(bn, nn.Identity):
            return self.conv.weight.to(dtype), cast(Tensor, self.conv.bias).to(dtype)
        assert isinstance(bn, (nn.BatchNorm2d, nn.SyncBatchNorm)), type(bn)
        assert bn.running_mean is not None and bn.running_var is not None
        gain = bn.weight.to(dtype) / (bn.running_var.to(dtype) + bn.eps).sqrt()
        bias = bn.bias.to(dtype) - bn.running_mean.to(dtype) * gain
        return self.conv.weight.to(dtype) * gain[:, None, None, None], bias

    def set_folded(self, weight: Tensor, bias: Tensor) -> None:
        """Replace weight, bias and normalisation by a folded weight and bias."""
        own = self.conv.weight.dtype
        self.conv.weight = nn.Parameter(weight.to(own), requires_grad=False)
        self.conv.bias = nn.Parameter(bias.to(own), requires_grad=False)
        self.bn = nn.Identity()


class DWConv(Conv):
    """Depth-wise `Conv`: as many groups as both channel counts allow."""

    def __init__(
        self, c_in: int, c_out: int, kernel: Size = 1, stride: Size = 1, dilation: int = 1, act: bool = True
    ) -> None:
        super().__init__(c_in, c_out, kernel, stride, groups=math.gcd(c_in, c_out), dilation=dilation, act=act)


class DepthwiseSeparableConv(nn.Sequential):
    """Depth-wise `Conv`, then a 1×1 `Conv` of `groups` to `c_out` (Howard et al., MobileNets, arXiv 1704.04861).

    YOLOX calls it DWConv; the names of its convolutions are those in YOLOX-Nano's weights.
    """

    def __init__(self, c_in: int, c_out: int, kernel: Size = 3, stride: Size = 1, groups: int = 1) -> None:
        super().__init__()
        self.dconv = Conv(c_in, c_in, kernel, stride, groups=c_in)
        self.pconv = Conv(c_in, c_out, groups=groups)


CONVS = (Conv, DepthwiseSeparableConv)  # for the 3×3 convolutions of other blocks
ConvClass = type[Conv] | type[DepthwiseSeparableConv]


class Bottleneck(nn.Module):
    """1×1 `Conv`, then 3×3 `conv`, added to the input where `shortcut` is set and the channels agree."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
        conv: ConvClass = Conv,
    ) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        self.cv1 = Conv(c_in, hidden, 1)
        self.cv2 = conv(hidden, c_out, 3, groups=groups)
        self.adds = shortcut and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y = cast(Tensor, self.cv2(self.cv1(x)))
        return x + y if self.adds else y


class C3(nn.Module):
    """Cross-stage partial block (Wang et al., CSPNet, 2020): a branch of bottlenecks and a bypass, concatenated.

    `repeats` is the number of bottlenecks, `shortcut` whether they add their input, `conv` the type of their 3×3
    convolutions, `groups` its groups (separable: of its 1×1), `expansion` the channels of a branch over `c_out`.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
        conv: ConvClass = Conv,
    ) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        self.cv1 = Conv(c_in, hidden, 1)
        self.cv2 = Conv(c_in, hidden, 1)
        self.cv3 = Conv(2 * hidden, c_out, 1)
        bottleneck = partial(Bottleneck, shortcut=shortcut, groups=groups, expansion=1.0, conv=conv)
        self.m = self.bottleneck_branch(hidden, repeats, bottleneck)

    @staticmethod
    def bottleneck_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        """Return the layers between `cv1` and `cv3`, which subclasses replace."""
        return nn.Sequential(*(bottleneck(channels, channels) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.cv3(concat((self.m(self.cv1(x)), self.cv2(x)))))


class SPP(nn.Module):
    """Spatial pyramid pooling (He et al. 2015): a map and its maxima over windows of odd sides, concatenated."""

    def __init__(self, c_in: int, c_out: int, kernels: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = Conv(c_in, hidden, 1)
        self.cv2 = Conv(hidden * (len(kernels) + 1), c_out, 1)
        self.m = nn.ModuleList(nn.MaxPool2d(kernel, stride=1, padding=kernel // 2) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return cast(Tensor, self.cv2(concat([x, *(pool(x) for pool in self.m)], 1)))


class SPPF(nn.Module):
    """`SPP` with a third of the work: three chained k×k maxima cover windows of k, 2k − 1 and 3k − 2."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = Conv(c_in, hidden, 1)
        self.cv2 = Conv(hidden * 4, c_out, 1)
        self.m = nn.MaxPool2d(kernel, stride=1, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        pyramid = [self.cv1(x)]
        for _ in range(3):
            pyramid.append(self.m(pyramid[-1]))
        return cast(Tensor, self.cv2(concat(pyramid)))


class Focus(nn.Module):
    """Space to depth: 2×2 pixels become four times the channels at half the size, followed by a `Conv`."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: Size = 1,
        stride: Size = 1,
        padding: Size | None = None,
        groups: int = 1,
        act: bool = True,
    ) -> None:
        super().__init__()
        self.conv = Conv(4 * c_in, c_out, kernel, stride, padding, groups, act=act)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, 2H, 2W) to (B, c_out, H, W)."""
        b, c, h, w = x.shape
        # Channel order of the checkpoint format: column of the 2×2 block slowest, then row, then c_in.
        blocks = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 5, 3, 1, 2, 4)
        return cast(Tensor, self.conv(blocks.reshape(b, 4 * c, h // 2, w // 2)))


class Concat(nn.Module):
    """Concatenation of several maps along `dim`."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: list[Tensor]) -> Tensor:
        return concat(features, self.dim)


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
    """A stage of `repeats` `InvertedBottleneck`s, of which the first has the stride, as in EfficientNet-Lite.

    The ImageNet weights were trained with TensorFlow, which at stride 2 pads only the end of an odd map. Here both
    sides are padded. Away from the edges the function is the same, on an image shifted by up to half a cell.
    """

    def __init__(
        self, c_in: int, c_out: int, repeats: int = 1, kernel: int = 3, stride: int = 1, expansion: int = 6
    ) -> None:
        super().__init__(
            InvertedBottleneck(c_in, c_out, kernel, stride, expansion),
            *(InvertedBottleneck(c_out, c_out, kernel, 1, expansion) for _ in range(repeats - 1)),
        )
