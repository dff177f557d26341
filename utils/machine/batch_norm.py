"""Computations of SyncBatchNorm before and after its all-reduces: in plain torch, or by torch's CUDA kernels.

Legend: x, dy float (B, C, H, W), dy the gradient of the output; x̂ = (x − μ) / σ; all else (C,): μ mean and σ standard
deviation float32, sums of the widest type.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BatchNormParts:
    """Plain torch, for any device; `widest` is the widest float type of the device.

    Sums are taken per image in float32, and over images in the widest type: rounding to float32 hides their order, and
    so the number of ranks. Otherwise an error in the last digit of activations becomes one in the third digit of
    gradients early in training.
    """

    def __init__(self, widest: torch.dtype = torch.float64) -> None:
        self.widest = widest

    def statistics(self, x: Tensor, shift: Tensor) -> Tensor:
        """Return Σ (x − shift), then Σ (x − shift)², (2C,)."""
        variances, means = (t.to(self.widest) for t in torch.var_mean(x.float(), (2, 3), correction=0))
        offsets = means - shift
        return torch.cat((offsets.sum(0), (variances + offsets.square()).sum(0))) * (x.shape[2] * x.shape[3])

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        """Return x̂ · weight + bias, of x's type."""
        gain = inv_std * weight
        return torch.addcmul(_wide(bias - mean * gain), x.float(), _wide(gain)).to(x.dtype)

    def sums(
        self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ dy, Σ dy x̂, and what `gradient` takes as `kept`."""
        dy32, normal = dy.float(), (x.float() - _wide(mean)) * _wide(inv_std)
        by_image = dy32.sum((2, 3)), (dy32 * normal).sum((2, 3))
        sum_dy, sum_dyx = (t.to(self.widest).sum(0) for t in by_image)
        return sum_dy, sum_dyx, normal

    def gradient(
        self, dy: Tensor, kept: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, means: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the gradient of x, of dy's type: weight/σ (dy − mean(dy) − x̂ mean(dy x̂)).

        `statistics` are μ and 1/σ, `means` float32 of dy and dy x̂ over all ranks.
        """
        mean_dy, mean_dyx = map(_wide, means)
        return ((dy.float() - mean_dy - kept * mean_dyx) * _wide(statistics[1] * weight)).to(dy.dtype)


class FusedBatchNormParts(BatchNormParts):
    """torch's CUDA kernels, which read dense inputs once, in their own type, and compute in float32."""

    def statistics(self, x: Tensor, shift: Tensor) -> Tensor:
        mean, inv_std = torch.batch_norm_stats(_dense(x), 0.0)
        var = inv_std.pow(-2).nan_to_num_(0.0, posinf=0.0)  # 0 = a constant channel
        offset = mean.to(self.widest) - shift
        return torch.cat((offset, var + offset.square())) * (x.shape[0] * x.shape[2] * x.shape[3])

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, inv_std, 0.0)

    def sums(
        self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _dense(x)
        dy = dy.contiguous(memory_format=_format(x))
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, inv_std, weight, True, False, False)
        return sum_dy.to(self.widest), (sum_dy_xmu * inv_std).to(self.widest), x

    def gradient(
        self, dy: Tensor, kept: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, means: tuple[Tensor, Tensor]
    ) -> Tensor:
        (mean, inv_std), (mean_dy, mean_dyx) = statistics, means
        dy = dy.contiguous(memory_format=_format(kept))
        one = torch.ones(1, dtype=torch.int32, device=dy.device)  # means are sums over one pixel
        return torch.batch_norm_backward_elemt(dy, kept, mean, inv_std, weight, mean_dy, mean_dyx / inv_std, one)


def _format(x: Tensor) -> torch.memory_format:
    is_channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)
