"""Convolutions that compute as a file in 8 bits does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Conv
from tessera.models.layers.eight_bits import WIDER, rounded_maps, rounded_weight
from tessera.models.layers.rep import RepConv


@given(st.integers(0, 2**16), st.floats(-9, 9), st.floats(0.01, 9))
def test_each_picture_and_each_output_has_steps_of_its_own(seed: int, shift: float, spread: float) -> None:
    """0 is one of them, and what is rounded moves by half a step at most."""
    values = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(seed)) * spread + shift
    maps, weight = rounded_maps(values), rounded_weight(values)
    for one, found in zip(values, maps, strict=True):
        step = WIDER * (one.amax().clamp(min=0) - one.amin().clamp(max=0)) / 255
        assert torch.equal(rounded_maps(one[None])[0], found), "whatever its batch"
        steps = found / step
        assert (steps - steps.round()).abs().max() < 1e-3 and (found - one).abs().max() <= 0.501 * step
    steps = weight / (values.abs().amax((1, 2, 3), keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 1e-3 and steps.abs().max().round() == 127


def test_the_gradient_passes_through_the_rounding() -> None:
    values = torch.randn(2, 3, 4, 4, requires_grad=True)
    (rounded_maps(values) * torch.arange(4.0)).sum().backward()
    assert torch.equal(values.grad, torch.arange(4.0).expand(2, 3, 4, 4))  # type: ignore[arg-type]
    assert torch.equal(rounded_maps(torch.zeros(1, 1, 2, 2)), torch.zeros(1, 1, 2, 2))


@pytest.mark.parametrize("make", [lambda: Conv(6, 8, 3), lambda: Conv(6, 8, act=False), lambda: RepConv(6, 8)])
def test_it_is_computed_alike_in_training_in_evaluation_and_folded(make: Callable[[], nn.Module]) -> None:
    """As one convolution with the normalisation in it, whose statistics stay; a copy, as the average is one, too."""
    torch.manual_seed(0)
    block, x = make(), torch.randn(2, 6, 9, 9)
    with torch.no_grad():
        for _ in range(20):
            block.train()(x)
    with torch.no_grad():
        for norm in (module for module in block.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.weight.fill_(20.0)  # so that much is cut before SiLU
    exact = block.eval()(x)
    for module in block.modules():
        if isinstance(module, Conv):
            module.in_bytes = True
    kept = {name: value.clone() for name, value in block.state_dict().items()}
    trained, evaluated = block.train()(x), block.eval()(x)
    assert all(torch.equal(value, kept[name]) for name, value in block.state_dict().items())
    copied = copy.deepcopy(block)
    block.fold_batch_norm()  # type: ignore[operator]
    folded = block(x)
    assert torch.equal(trained, evaluated) and torch.equal(trained, copied(x))
    step = WIDER * (exact.amax() - exact.amin()) / 255
    assert (folded - evaluated).abs().max() < 3 * step, "a number between two steps may go either way"
    assert 0 < (evaluated - exact).abs().max() < 0.1 * exact.abs().max()


def test_the_first_layer_and_the_last_convolutions_stay_in_float() -> None:
    model = DetectionModel("tessera-n.yaml", nc=3)
    model.compute_in_bytes()
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, Conv)}
    assert {name for name, module in convolutions.items() if not module.in_bytes} == {"model.0"}
