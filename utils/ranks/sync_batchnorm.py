"""BatchNorm over all ranks on the CPU, with the same result however the batch is cut."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.ranks.collectives import Collectives


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with statistics over all ranks, for devices that torch.nn.SyncBatchNorm refuses.

    Attributes:
        collectives: over all ranks.
    """

    collectives: Collectives

    @classmethod
    def convert(cls, plain: nn.BatchNorm2d, collectives: Collectives) -> SyncBatchNorm2d:
        """Let `plain` take this class, so that its parameters and buffers stay the same objects."""
        plain.__class__ = cls
        converted = cast(SyncBatchNorm2d, plain)
        converted.collectives = collectives
        return converted

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same shape; evaluation is plain BatchNorm."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        out, mean, var, count = _SyncBatchNorm.apply(x, self.weight, self.bias, self.eps, self.collectives)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return out


class _SyncBatchNorm(torch.autograd.Function):
    """Normalise by statistics of the global batch, with the same result however the batch is cut.

    Sums are taken image by image in float32 and added up over images and ranks in float64, so that rounding to float32
    leaves nothing of their order. That matters: early in training a network turns an error of one last digit in its
    activations into one of the third digit in its gradients.

    Forward: mean and variance merged from the images' (Chan, Golub, LeVeque 1979).
    Backward: dx = γ/σ (dy − mean(dy) − x̂ mean(dy x̂)), both means over the global batch.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, collectives: Collectives
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.collectives = collectives
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
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.mark_non_differentiable(mean, var)
        gain = scale * weight
        out = torch.addcmul((bias - mean * gain).view(1, -1, 1, 1), x32, gain.view(1, -1, 1, 1))
        return out.to(x.dtype), mean, var, total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, scale, total = ctx.saved_tensors
        shape = (1, -1, 1, 1)
        dy = grad.float()
        normal = (x.float() - mean.view(shape)) * scale.view(shape)
        sums = torch.stack((dy.sum((2, 3)).double().sum(0), (dy * normal).sum((2, 3)).double().sum(0)))
        grad_bias, grad_weight = sums.float()
        mean_dy, mean_dyx = (ctx.collectives.all_reduce(sums) / total).float().view(2, *shape)
        dx = (dy - mean_dy - normal * mean_dyx) * (scale * weight).view(shape)
        return dx.to(x.dtype), grad_weight, grad_bias, None, None
