"""Computations of SyncBatchNorm before and after its all-reduces: in plain torch, or by torch's CUDA kernels.

Legend: x, dy float (B, C, H, W), dy the gradient of the output; all else float32 (C,); μ mean, σ standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIXELS = (0, 2, 3)


class BatchNormParts:
    """Plain torch, for any device."""

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and (biased) variance of each channel of x."""
        var, mean = torch.var_mean(x.float(), _PIXELS, correction=0)
        return mean, var

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        """Return (x − μ) / σ · weight + bias, of x's type."""
        gain = inv_std * weight
        return torch.addcmul(_wide(bias - mean * gain), x.float(), _wide(gain)).to(x.dtype)

    def sums(self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ dy and Σ dy (x − μ)."""
        dy32 = dy.float()
        return dy32.sum(_PIXELS), (dy32 * (x.float() - _wide(mean))).sum(_PIXELS)

    def gradient(
        self, dy: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, sums: Tensor, count: Tensor
    ) -> Tensor:
        """Return the gradient of x, of its type: weight/σ (dy − mean(dy) − (x − μ)/σ² mean(dy (x − μ))).

        `statistics` are μ and 1/σ, `sums` (2, C) the results of `sums` added up over the ranks, `count` () the pixels
        of all ranks.
        """
        mean, inv_std = statistics
        mean_dy, mean_dy_xmu = sums / count
        centred = (x.float() - _wide(mean)) * _wide(inv_std.square() * mean_dy_xmu)
        return ((dy.float() - _wide(mean_dy) - centred) * _wide(inv_std * weight)).to(x.dtype)


class FusedBatchNormParts(BatchNormParts):
    """torch's CUDA kernels, which read their inputs once, in their own type, and compute in float32."""

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, inv_std = torch.batch_norm_stats(x, 0.0)
        return mean, inv_std.pow(-2).nan_to_num_(0.0, posinf=0.0)  # 0 = a constant channel

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        return torch.batch_norm_elemt(x, weight, bias, mean, inv_std, 0.0)

    def sums(self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, inv_std, weight, True, False, False)
        return sum_dy, sum_dy_xmu

    def gradient(
        self, dy: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, sums: Tensor, count: Tensor
    ) -> Tensor:
        (mean, inv_std), (sum_dy, sum_dy_xmu) = statistics, sums
        counts = count.to(torch.int32).view(1)  # the kernel sums counts of ranks
        return torch.batch_norm_backward_elemt(dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, counts)


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)
