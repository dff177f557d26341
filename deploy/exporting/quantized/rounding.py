"""GPTQ rounding of convolution weights to 8 bits (Frantar et al. 2022, after Hassibi and Stork 1993).

Inputs of a convolution are correlated, so that the later weights of an output can correct the rounding error of the
earlier ones. It needs one pass over a few images and no gradient. The rounded weights lie on the steps that both
runtimes' quantisers derive, which then change nothing.

Legend: G groups, O outputs of a group, K inputs of an output (channels of a group × kernel), L positions in an image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_IMAGES = 16
_STEPS = 127  # each side of 0
_DAMPING = 0.01  # of the mean square of the inputs, added to that of each: some are always 0


@torch.no_grad()
def round_weights(network: nn.Module, names: Collection[str], images: Iterable[Tensor]) -> None:
    """Round convolution weights to 255 symmetric steps per output, in place.

    It takes 4 K² bytes of memory per group: 70 MB for 1.9 million weights, 3 GB for 86 million. BatchNorm of `network`
    is folded. `names` are parameter names, of which unknown ones are ignored; `images` are float32 (1, 3, H, W) each.
    """
    convolutions = [module for name, module in network.named_modules() if f"{name}.weight" in names]
    assert convolutions, names
    moments: dict[nn.Module, Tensor] = {}

    def observe(convolution: Any, given: tuple[Tensor]) -> None:
        columns = F.unfold(
            given[0], convolution.kernel_size, convolution.dilation, convolution.padding, convolution.stride
        )
        parts = columns.unflatten(1, (convolution.groups, -1))[0]  # (G, K, L)
        moments[convolution] = moments.get(convolution, torch.zeros(())) + parts @ parts.mT

    hooks = [convolution.register_forward_pre_hook(observe) for convolution in convolutions]
    try:
        for image in images:
            network(image)
    finally:
        for hook in hooks:
            hook.remove()
    for convolution, moment in moments.items():
        weight: Any = convolution.weight
        parts = weight.reshape(len(moment), -1, moment.shape[-1])
        rounded = [round_together(part, one) for part, one in zip(parts, moment, strict=True)]
        weight.copy_(torch.stack(rounded).reshape(weight.shape))


def round_together(weights: Tensor, moment: Tensor) -> Tensor:
    """Return weights (O, K) rounded to steps at a small mean square error of the outputs.

    Weights of inputs with the largest mean square are rounded first. The largest weight of each output stays.
    `moment` (K, K) are the sums of products of two inputs.
    """
    order = moment.diagonal().argsort(descending=True)
    left, product = weights[:, order].double(), moment[order][:, order].double()
    step = left.abs().amax(1).clamp(min=1e-12) / _STEPS
    largest = left.abs() >= step[:, None] * (_STEPS - 1e-6)
    exact = left.clone()
    product += torch.eye(len(product)) * (_DAMPING * product.diagonal().mean() + 1e-12)
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(product)), upper=True)
    for k in range(left.shape[1]):
        nearest = torch.where(largest[:, k], exact[:, k], (left[:, k] / step).round().clamp(-_STEPS, _STEPS) * step)
        lost = (left[:, k] - nearest) / spread[k, k]
        left[:, k:] -= lost[:, None] * spread[k, k:]
        left[:, k] = nearest
    return left[:, order.argsort()].to(weights.dtype)
