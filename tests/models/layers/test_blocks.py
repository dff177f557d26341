"""Basic blocks of model YAMLs, and variants of C3; folded, branches compute the same as one convolution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import C3, SILU, SPP, SPPF, Conv, DepthwiseSeparableConv, DWConv, Focus, concat
from tessera.models.layers.c3_variants import (
    C3TR,
    C3Ghost,
    GhostBottleneck,
    RepBottleneck,
    RepC3,
    RepConv,
    TransformerLayer,
)
from tessera.models.layers.elan import Elan
from tests.models.layers.made_blocks import image, randomised


@pytest.mark.parametrize(
    "block",
    [
        Conv(4, 8, 3),
        DWConv(4, 8, 3),
        C3(4, 8, 2, conv=DepthwiseSeparableConv),
        Focus(4, 8, 3),
        GhostBottleneck(4, 8, 3, 2),
        C3Ghost(4, 16, 2),
        C3TR(4, 16),
        Elan(4, 16, 2),
    ],
)
def test_folding_changes_parameters_not_results(block: nn.Module) -> None:
    randomised(block)
    x = image(2, 4, 8, 10)
    with torch.no_grad():
        expected = block(x.clone())
        for _ in range(2):  # the second time there is nothing left to fold
            for module in block.modules():
                if isinstance(module, Conv):
                    module.fold_batch_norm()
            assert not any(isinstance(module, nn.BatchNorm2d) for module in block.modules())
            torch.testing.assert_close(block(x.clone()), expected, atol=1e-5, rtol=1e-5)


def test_silu_overwrites_only_while_no_gradients_are_recorded() -> None:
    x = torch.linspace(-4, 4, 9)
    expected = x * torch.sigmoid(x)
    kept = x.clone().requires_grad_()
    y = SILU(kept)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(kept.detach(), x)
    assert torch.autograd.gradcheck(SILU, x.double().requires_grad_())
    with torch.no_grad():
        overwritten = x.clone()
        assert SILU(overwritten).data_ptr() == overwritten.data_ptr()
        torch.testing.assert_close(overwritten, expected)


def test_chained_pools_see_what_wide_pools_see() -> None:
    slow, fast = randomised(SPP(8, 8, (5, 9, 13))), SPPF(8, 8, 5)
    fast.load_state_dict(slow.state_dict())
    x = image(2, 8, 20, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast.eval()(x), slow(x), atol=0, rtol=0)


@pytest.mark.parametrize("stride", [1, 2])
def test_ghosts_follow_the_convolved_half_and_a_bottleneck_adds_its_input(stride: int) -> None:
    block = randomised(GhostBottleneck(8, 8, 3, stride))
    ghost, x = block.conv[0], image(1, 8, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(ghost(x), torch.cat((ghost.cv1(x), ghost.cv2(ghost.cv1(x))), 1))
        torch.testing.assert_close(block(x), block.conv(x) + (x if stride == 1 else block.shortcut(x)))
        assert block(x).shape == (1, 8, 8 // stride, 8 // stride)


def test_attention_by_hand() -> None:
    """Softmax of the products of queries and keys over the root of a head's width, for each head."""
    torch.manual_seed(0)
    layer = TransformerLayer(8, 2)
    nn.init.normal_(layer.ma.in_proj_bias)
    cells = torch.rand(3, 5, 8)
    with torch.no_grad():
        projected = zip(
            (layer.q, layer.k, layer.v), layer.ma.in_proj_weight.chunk(3), layer.ma.in_proj_bias.chunk(3), strict=True
        )
        q, k, v = ((f(cells) @ w.T + b).view(3, 5, 2, 4).transpose(1, 2) for f, w, b in projected)
        weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
        attended = layer.ma.out_proj((weights @ v).transpose(1, 2).reshape(3, 5, 8)) + cells
        torch.testing.assert_close(layer(cells), attended + layer.fc2(layer.fc1(attended)))


def test_a_transformer_treats_all_cells_alike() -> None:
    """Cells in another order give their outputs in that order: a place in the map is no information."""
    block = randomised(C3TR(8, 16, 2))
    x = image(2, 8, 4, 6)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shuffled = x.flatten(2)[:, :, order].view(x.shape)
        torch.testing.assert_close(block(shuffled).flatten(2), block(x).flatten(2)[:, :, order])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dim", [1, -1])
def test_concat_has_the_value_of_cat_and_dense_gradients(layout: torch.memory_format, dim: int) -> None:
    maps = [torch.randn(2, 3, 4, 5).to(memory_format=layout).requires_grad_() for _ in range(3)]
    whole, expected = concat(maps, dim), torch.cat(maps, dim)
    assert torch.equal(whole, expected)
    seen = torch.randn_like(whole)
    ours, theirs = (torch.autograd.grad(output, maps, seen) for output in (whole, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.equal(gradient, right) and gradient.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1)])
def test_a_depthwise_convolution_trains_in_bfloat16_as_in_float32(kernel: int, stride: int) -> None:
    block, x = DWConv(8, 8, kernel, stride), torch.randn(2, 8, 9, 9)
    in_float32 = block.conv(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block.conv(x), in_float32.bfloat16()) == (kernel * stride > 3)
        with torch.no_grad():
            assert not torch.equal(block.conv(x), in_float32.bfloat16())
    block(x).sum().backward()
    plain = block.conv.weight.grad.clone()
    for block.frozen_statistics in (False, True):
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = block(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        if not block.frozen_statistics:
            torch.testing.assert_close(block.conv.weight.grad, plain, rtol=0.05, atol=0.05 * float(plain.abs().max()))


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
