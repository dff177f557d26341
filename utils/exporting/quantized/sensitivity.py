"""The layers that stay in float: 8 bits in one of them alone already change what the network finds.

A layer is tried by itself, the others in float: its convolutions' weights, what they read and what they give are
rounded as a quantiser does. That takes one pass of a few pictures for each layer, in torch, and serves every runtime.
It is often the first layers that need it: some of their channels reach far beyond the others, and all have one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Conv
from tessera.utils.exporting.raw_network import BareNetwork

PICTURES = 4
MOST = 0.035  # of the scores, by their root mean square, that 8 bits in one layer may change


def sensitive_layers(model: DetectionModel, images: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers of a raw model's layers, as its YAML counts them, that stay in float.

    The first is always among them: it reads three channels, which is slower in 8 bits, and the finest picture.
    """
    return (0, *(layer for layer, effect in effects(model, images).items() if layer and effect > MOST))


def effects(model: DetectionModel, images: Iterable[Tensor]) -> dict[int, float]:
    """By how much of the scores 8 bits in each layer change them, by root mean squares of both.

    `images` are what the network takes, float32 (1, 3, H, W) each.
    """
    network, pictures = BareNetwork(model), tuple(images)
    found: dict[int, float] = {}
    with torch.no_grad():
        exact = [network(image)[..., 4:] for image in pictures]
        size = sum(float(scores.square().sum()) for scores in exact)
        for number, layer in enumerate(network.model.model):
            convolutions = [module for module in layer.modules() if isinstance(module, Conv)]
            if convolutions and size:
                with _in_bytes(convolutions):
                    rounded = [network(image)[..., 4:] for image in pictures]
                change = sum(float((one - two).square().sum()) for one, two in zip(exact, rounded, strict=True))
                found[number] = (change / size) ** 0.5
    return found


@contextmanager
def _in_bytes(convolutions: Iterable[Conv]) -> Iterator[None]:
    """Inside, these convolutions compute with numbers of 8 bits."""
    weights = {module: module.conv.weight.data for module in convolutions}
    hooks: list[Any] = []
    for module, weight in weights.items():
        module.conv.weight.data = _rounded_weight(weight)
        hooks.append(module.register_forward_pre_hook(lambda _, given: (_rounded(given[0]),)))
        hooks.append(module.register_forward_hook(lambda _, given, made: _rounded(made)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in weights.items():
            module.conv.weight.data = weight


def _rounded_weight(weight: Tensor) -> Tensor:
    """(O, I, kH, kW) to multiples of 1/127 of the largest of each output."""
    steps = weight.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12) / 127
    return (weight / steps).round() * steps


def _rounded(values: Tensor) -> Tensor:
    """To 256 steps from the smallest to the largest, 0 being one of them."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    step = (high - low) / 255 or 1.0
    return torch.fake_quantize_per_tensor_affine(values, step, round(-low / step), 0, 255)
