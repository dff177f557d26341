"""Synchronised BatchNorm: statistics over all ranks, without a wait of the host for the device.

Legend: x float (B, C, H, W), this rank's part of the global batch; statistics float32 (C,).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.batch_norm import BatchNormParts
from tessera.utils.ranks.collectives import Collectives


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with statistics over all ranks; torch.nn.SyncBatchNorm rejects the CPU and waits for the device."""

    collectives: Collectives
    parts: BatchNormParts | None  # of the device, for one message a pass; None = `_Exact`
    widest: torch.dtype  # widest float type of the device, for sums over the ranks

    @classmethod
    def convert(cls, plain: nn.BatchNorm2d, collectives: Collectives, accelerator: Accelerator) -> None:
        """Change the class of `plain`, whose parameters and buffers stay the same objects."""
        plain.__class__ = cls
        converted = cast(SyncBatchNorm2d, plain)
        converted.collectives = collectives
        converted.parts, converted.widest = accelerator.batch_norm, accelerator.widest

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W); in evaluation as plain BatchNorm."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        function = _Exact if self.parts is None else _OneMessage
        out, mean, var, count = function.apply(x, self.weight, self.bias, self)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return out


class _OneMessage(torch.autograd.Function):
    """Synchronised BatchNorm with one message per forward (sum, sum of squares, count) and one per backward.

    Sums are of the distance to the running mean, which all ranks share. So the variance is no difference of large
    numbers where float32 is the widest type (Chan, Golub, LeVeque 1983: shifted data).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: SyncBatchNorm2d
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts, shift = layer.parts, layer.running_mean
        assert parts is not None and shift is not None
        is_channels_last = x.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        x = x.contiguous(memory_format=ctx.memory_format)
        pixels = x.shape[0] * x.shape[2] * x.shape[3]
        mean, var = parts.statistics(x)
        offset = mean.to(layer.widest) - shift
        sums = torch.cat((offset, var + offset.square(), offset.new_ones(1))) * pixels
        sums = layer.collectives.all_reduce(sums)
        total = sums[-1]
        offset, squares = (sums[:-1] / total).view(2, -1)
        mean = (shift + offset).float()
        var = (squares - offset.square()).clamp_min(0).float()
        inv_std = torch.rsqrt(var + layer.eps)
        ctx.layer, count = layer, total.float()
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.mark_non_differentiable(mean, var)
        return parts.normalise(x, weight, bias, mean, inv_std), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        dy = grad.contiguous(memory_format=ctx.memory_format)
        sum_dy, sum_dy_xmu = ctx.layer.parts.sums(dy, x, mean, inv_std, weight)
        sums = ctx.layer.collectives.all_reduce(torch.stack((sum_dy, sum_dy_xmu)))
        dx = ctx.layer.parts.gradient(dy, x, (mean, inv_std), weight, sums, count)
        return dx, sum_dy_xmu * inv_std, sum_dy, None


class _Exact(torch.autograd.Function):
    """Synchronised BatchNorm with two messages per forward and one per backward, independent of the number of ranks.

    Sums are taken per image in float32, and over images and ranks in float64: rounding to float32 hides their order.
    Otherwise an error in the last digit of activations becomes one in the third digit of gradients early in training.

    Forward: mean and variance merged from the images' (Chan, Golub, LeVeque 1979).
    Backward: dx = γ/σ (dy − mean(dy) − x̂ mean(dy x̂)), both means over the global batch.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: SyncBatchNorm2d
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        collectives = ctx.collectives = layer.collectives
        x32 = x.float()
        pixels = x.shape[2] * x.shape[3]
        variances, means = (t.double() for t in torch.var_mean(x32, (2, 3), correction=0))
        sums = torch.cat((means.sum(0) * pixels, means.new_tensor([x.shape[0] * pixels])))
        sums = collectives.all_reduce(sums)
        total = sums[-1]
        mean64 = sums[:-1] / total
        squares = (variances + (means - mean64).square()).sum(0) * pixels
        var = (collectives.all_reduce(squares) / total).float()
        mean = mean64.float()
        scale = torch.rsqrt(var + layer.eps)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.mark_non_differentiable(mean, var)
        gain = scale * weight
        out = torch.addcmul((bias - mean * gain).view(1, -1, 1, 1), x32, gain.view(1, -1, 1, 1))
        return out.to(x.dtype), mean, var, total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale, total = ctx.saved_tensors
        shape = (1, -1, 1, 1)
        dy = grad.float()
        normal = (x.float() - mean.view(shape)) * scale.view(shape)
        sums = torch.stack((dy.sum((2, 3)).double().sum(0), (dy * normal).sum((2, 3)).double().sum(0)))
        grad_bias, grad_weight = sums.float()
        mean_dy, mean_dyx = (ctx.collectives.all_reduce(sums) / total).float().view(2, *shape)
        dx = (dy - mean_dy - normal * mean_dyx) * (scale * weight).view(shape)
        return dx.to(x.dtype), grad_weight, grad_bias, None
