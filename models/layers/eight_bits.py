"""Numbers rounded as a file in 8 bits has them, so that a model learns to do with them: fake quantisation.

Each picture's maps have 256 steps from their smallest to their largest value, and the weights of each output 255, 0
among them (Jacob et al. 2018). The ranges are those of the moment: nothing is kept in a checkpoint, and what a picture
gives does not depend on its batch. The gradient passes through the rounding as if there were none (Bengio et al. 2013).

A normalisation by fixed statistics multiplies all weights of an output by one number, and so their steps too: rounding
the folded weight is rounding the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SILU_LOW = -8.0  # where SiLU is −0.003: what lies below is no reason for coarser steps
_LEAST = 1e-12  # of a step: of maps and weights that are 0


def rounded_maps(maps: Tensor) -> Tensor:
    """(B, C, H, W) on the steps of each picture."""
    low, high = maps.detach().amin((1, 2, 3), keepdim=True), maps.detach().amax((1, 2, 3), keepdim=True)
    steps = (high.float().clamp(min=0) - low.float().clamp(max=0)) / 255
    return _round(maps, steps)


def rounded_weight(weight: Tensor) -> Tensor:
    """(O, I, kH, kW) on the steps of each output."""
    return _round(weight, weight.detach().float().abs().amax((1, 2, 3), keepdim=True) / 127)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor, steps: Tensor) -> Tensor:
        return ((values / steps).round_() * steps).to(values.dtype)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _round(values: Tensor, steps: Tensor) -> Tensor:
    found: Tensor = _Round.apply(values, steps.clamp(min=_LEAST))
    return found
