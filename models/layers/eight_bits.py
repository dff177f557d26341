"""Numbers rounded about as in a file in 8 bits, so that a model learns to do with them: fake quantisation.

Maps are rounded to multiples of 1/255 of a range, 0 in it, that is wider than their picture's, and weights to multiples
of 1/127 of the largest of their output (Jacob et al. 2018). The ranges are those of the moment: nothing is kept in a
checkpoint, and what a picture gives does not depend on its batch. A file has the ranges of many pictures, hence the
wider ones: its steps are as coarse. Where autocast computes in 16 bits, its own rounding comes on top. The gradient
passes as if nothing were rounded (Bengio et al. 2013).

A normalisation by fixed statistics multiplies all weights of an output by one number, and so their steps too: rounding
the folded weight is rounding the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SILU_LOW = -8.0  # where SiLU is −0.003: what lies below is no reason for coarser steps
WIDER = 1.4  # the range of 64 pictures is 1.15 to 2.3 times that of the median one, by convolution (yolov5n on coco128)
_LEAST = 1e-12  # of a step: of maps and weights that are 0


def rounded_maps(maps: Tensor) -> Tensor:
    """(B, C, H, W) on the steps of a range around each picture's."""
    low, high = maps.detach().amin((1, 2, 3), keepdim=True), maps.detach().amax((1, 2, 3), keepdim=True)
    steps = (high.float().clamp(min=0) - low.float().clamp(max=0)) * (WIDER / 255)
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
