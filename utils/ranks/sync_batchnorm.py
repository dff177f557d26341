"""Synchronised BatchNorm: statistics over all ranks, without a wait of the host for the device.

Legend: x float (B, C, H, W), this rank's part of the global batch; statistics float32 (C,).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tessera.utils.machine.batch_norm import BatchNormParts
from tessera.utils.ranks.collectives import Collectives


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with statistics over all ranks; torch.nn.SyncBatchNorm rejects the CPU and waits for the device."""

    collectives: Collectives
    parts: BatchNormParts  # of the device

    @classmethod
    def convert(cls, plain: nn.BatchNorm2d, collectives: Collectives, parts: BatchNormParts) -> None:
        """Change the class of `plain`, whose parameters and buffers stay the same objects."""
        plain.__class__ = cls
        converted = cast(SyncBatchNorm2d, plain)
        converted.collectives, converted.parts = collectives, parts

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W); in evaluation as plain BatchNorm."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        out, mean, var, count = _Normalise.apply(x, self.weight, self.bias, self)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return out


class _Normalise(torch.autograd.Function):
    """Synchronised BatchNorm with one message per forward (sum, sum of squares, count) and one per backward.

    Sums are of the distance to the running mean, which all ranks share. So the variance is no difference of large
    numbers where float32 is the widest type (Chan, Golub, LeVeque 1983: shifted data).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: SyncBatchNorm2d
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts, shift = layer.parts, layer.running_mean
        assert shift is not None
        sums = parts.statistics(x, shift)
        count = sums.new_full((1,), x.shape[0] * x.shape[2] * x.shape[3])
        sums = layer.collectives.all_reduce(torch.cat((sums, count)))
        total = sums[-1]
        offset, squares = (sums[:-1] / total).view(2, -1)
        mean = (shift + offset).float()
        var = (squares - offset.square()).clamp_min(0).float()
        inv_std = torch.rsqrt(var + layer.eps)
        ctx.layer = layer
        ctx.save_for_backward(x, weight, mean, inv_std, total)
        ctx.mark_non_differentiable(mean, var)
        return parts.normalise(x, weight, bias, mean, inv_std), mean, var, total.float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, inv_std, total = ctx.saved_tensors
        parts: BatchNormParts = ctx.layer.parts
        sum_dy, sum_dyx, kept = parts.sums(dy, x, mean, inv_std, weight)
        means = (ctx.layer.collectives.all_reduce(torch.stack((sum_dy, sum_dyx))) / total).float()
        dx = parts.gradient(dy, kept, (mean, inv_std), weight, (means[0], means[1]))
        return dx, sum_dyx.float(), sum_dy.float(), None
