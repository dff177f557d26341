"""Re-parameterised blocks: the branches together compute the same as the folded convolution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import SILU, Conv
from tessera.models.layers.elan import RepBottleneck, RepC3, RepConv
from tests.models.layers.made_blocks import image, randomised


def branch(block: Conv, x: Tensor) -> Tensor:
    """A convolution and its normalisation, written out in float64."""
    bn = block.bn
    y = F.conv2d(x.double(), block.conv.weight.double(), padding=block.conv.padding)
    mean, var, gain, bias = (t.double()[:, None, None] for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
    return (y - mean) / (var + bn.eps).sqrt() * gain + bias


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_one_convolution_is_both_branches(c_in: int, c_out: int, height: int, width: int) -> None:
    """Of any channels, and of maps smaller than the kernel; folding is idempotent."""
    block = randomised(RepConv(c_in, c_out))
    x = image(2, c_in, height, width) - 0.5
    with torch.no_grad():
        y = branch(block.cv1, x) + branch(block.cv2, x)
        torch.testing.assert_close(block(x).double(), y * y.sigmoid(), atol=1e-4, rtol=1e-4)
        for _ in range(2):
            block.fold_batch_norm()
            assert set(block.state_dict()) == {"cv1.conv.weight", "cv1.conv.bias"}
            torch.testing.assert_close(block(x).double(), y * y.sigmoid(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("repeats", [1, 3])
def test_bottlenecks_of_half_the_channels_are_joined_with_a_branch_around_them(repeats: int) -> None:
    block = randomised(RepC3(6, 16, repeats))
    assert len(block.m) == repeats
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        deep = block.cv1(x)
        for step in block.m:
            assert isinstance(step, RepBottleneck)
            deep = deep + step.cv2(step.cv1(deep))
        torch.testing.assert_close(block(x), block.cv3(torch.cat((deep, block.cv2(x)), 1)))


def test_the_activation_of_the_yaml_follows_the_sum_alone() -> None:
    described = {
        "nc": 2,
        "activation": "nn.ReLU()",
        "backbone": [[-1, 1, "Conv", [8, 3, 8]], [-1, 2, "RepElan", [16]]],
        "head": [[[1], 1, "DetectFree", ["nc"]]],
    }
    model = DetectionModel(described)
    blocks = [module for module in model.modules() if isinstance(module, RepConv)]
    assert len(blocks) == 4
    for block in blocks:
        assert isinstance(block.act, nn.ReLU)
        assert isinstance(block.cv1.act, nn.Identity) and isinstance(block.cv2.act, nn.Identity)
    assert not any(module is SILU for module in model.modules())
    randomised(model)
    x = image(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)[0]
        torch.testing.assert_close(model.fuse()(x)[0], before, atol=1e-3, rtol=1e-4)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
