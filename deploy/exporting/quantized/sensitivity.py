"""Sensitivity analysis for 8 bits: the layers that must stay float32.

Each layer is quantised alone, in torch: weights, inputs and outputs of its convolutions are rounded as a quantiser
does. Early layers are often sensitive: the range of some channels is far wider than that of others, and all share one
scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tessera.deploy.exporting.raw_network import RawNetwork
from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Conv

N_IMAGES = 4
MAX_EFFECT = 0.035  # relative change of the scores (root mean square) that 8 bits in one layer may cause


def sensitive_layers(model: DetectionModel, images: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the numbers of the layers, as the model YAML counts them, that stay float32.

    The first is always among them: with three input channels it is slower in 8 bits.
    """
    return (0, *(layer for layer, effect in layer_effects(model, images).items() if layer and effect > MAX_EFFECT))


def layer_effects(model: DetectionModel, images: Iterable[Tensor]) -> dict[int, float]:
    """Return the relative change of the scores (root mean square) by 8 bits in each layer.

    `images` are float32 (1, 3, H, W) each.
    """
    network, inputs = RawNetwork(model), tuple(images)
    found: dict[int, float] = {}
    with torch.no_grad():
        exact = [network(image)[..., 4:] for image in inputs]
        size = sum(float(scores.square().sum()) for scores in exact)
        for number, layer in enumerate(network.model.model):
            convolutions = [module for module in layer.modules() if isinstance(module, Conv)]
            if convolutions and size:
                with _quantized(convolutions):
                    rounded = [network(image)[..., 4:] for image in inputs]
                change = sum(float((one - two).square().sum()) for one, two in zip(exact, rounded, strict=True))
                found[number] = (change / size) ** 0.5
    return found


@contextmanager
def _quantized(convolutions: Iterable[Conv]) -> Iterator[None]:
    """Compute these convolutions with 8-bit numbers."""
    weights = {module: module.conv.weight.data for module in convolutions}
    hooks: list[Any] = []
    for module, weight in weights.items():
        steps = weight.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12) / 127  # of each output
        module.conv.weight.data = (weight / steps).round() * steps
        hooks.append(module.register_forward_pre_hook(lambda _, given: (_rounded(given[0]),)))
        hooks.append(module.register_forward_hook(lambda _, given, made: _rounded(made)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in weights.items():
            module.conv.weight.data = weight


def _rounded(values: Tensor) -> Tensor:
    """Round to 256 steps from the smallest to the largest value, 0 among them."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    step = (high - low) / 255 or 1.0
    return torch.fake_quantize_per_tensor_affine(values, step, round(-low / step), 0, 255)
