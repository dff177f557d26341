"""Layers of EfficientNet-Lite, and normalisations that keep their statistics."""

from __future__ import annotations

import copy

import pytest
import torch

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Conv, InvertedBottleneck, InvertedResidual
from tests.models.layers.made_blocks import randomised


@pytest.mark.parametrize(("stride", "c_out", "adds"), [(1, 8, True), (2, 8, False), (1, 16, False)])
def test_a_bottleneck_adds_its_input_where_it_fits(stride: int, c_out: int, adds: bool) -> None:
    block = randomised(InvertedBottleneck(8, c_out, 5, stride, 6))
    x = torch.rand(2, 8, 12, 16)
    inner = block.cv3(block.cv2(block.cv1(x)))
    assert inner.shape == (2, c_out, 12 // stride, 16 // stride)
    torch.testing.assert_close(block(x), x + inner if adds else inner)
    assert float(block.cv2(block.cv1(x)).detach().amax()) <= 6


def test_the_first_of_a_stage_has_its_stride() -> None:
    stage = InvertedResidual(8, 16, 3, 3, 2, 6)
    assert stage(torch.rand(1, 8, 16, 16)).shape == (1, 16, 8, 8)
    assert [block.adds for block in stage] == [False, True, True]


def test_fixed_statistics_train_as_an_evaluated_normalisation_does() -> None:
    """Outputs, and gradients of weight, gain, shift and input; the statistics stay as they are."""
    fixed = randomised(Conv(4, 8, 3)).train()
    evaluated = copy.deepcopy(fixed).eval()
    fixed.frozen_statistics = True
    before = copy.deepcopy(dict(fixed.named_buffers()))
    x = torch.rand(2, 4, 6, 6).requires_grad_()
    outputs = [fixed(x), evaluated(x)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(output.square().sum(), [*layer.parameters(), x])
        for layer, output in zip((fixed, evaluated), outputs, strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(buffer, before[name]) for name, buffer in fixed.named_buffers())
    fixed.frozen_statistics = False
    fixed(x)
    assert not torch.equal(fixed.bn.running_mean, before["bn.running_mean"])


def test_only_the_first_layers_of_a_model_fix_theirs() -> None:
    model = DetectionModel("tessera-lite0.yaml", nc=2)
    model.freeze_bn_statistics(8)
    fixed = {name.split(".")[1] for name, m in model.named_modules() if isinstance(m, Conv) and m.frozen_statistics}
    assert fixed == set("01234567")
