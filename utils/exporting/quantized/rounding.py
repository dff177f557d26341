"""Weights of 8 bits that are rounded together: what one loses, those of the same output that come after it make up for.

Rounded each to the nearest step, weights leave an error in what a convolution gives; with inputs that go together, as
those of neighbouring pixels do, the next weights can take most of it back. That is GPTQ of Frantar et al. 2022, after
Optimal Brain Surgeon of Hassibi and Stork 1993: no gradient, one pass of a few pictures. What comes out lies on the
steps that a quantiser of either runtime finds by itself, so that it changes nothing any more.

Legend: G groups, O outputs of a group, K inputs of an output (channels of a group × kernel), L places in a picture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PICTURES = 16
_STEPS = 127  # each side of 0
_DAMPING = 0.01  # of the mean square of an input, added to that of each: some never occur


@torch.no_grad()
def round_weights(network: nn.Module, names: Collection[str], images: Iterable[Tensor]) -> None:
    """Round weights of convolutions to 255 steps for each output, 0 in their middle, in place.

    It takes 4 K² bytes of memory for each group: 70 MB for 1.9 million weights, 3 GB for 86 million.

    Args:
        network: for evaluation, its normalisations folded.
        names: of the weights, as its parameters are named; others have no meaning.
        images: what it takes, float32 (1, 3, H, W) each.
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
    """Weights on their steps, the largest of each output being one, at a small mean square of what their sums lose.

    The order is that of the inputs' mean squares, the largest first.

    Args:
        weights: (O, K).
        moment: (K, K), sums of the products of two inputs each.
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
