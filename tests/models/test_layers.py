"""Layers of model YAMLs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import (
    C3,
    SILU,
    SPP,
    SPPF,
    Conv,
    DepthwiseSeparableConv,
    DWConv,
    Focus,
    InvertedBottleneck,
    InvertedResidual,
    concat,
)
from tessera.models.layers.elan import AConv, ADown, ConvElan, Elan, RepBottleneck, RepC3, RepConv, RepElan
from tessera.utils.errors import ConfigError


def randomised(module: Any) -> Any:
    """Give every normalisation statistics and parameters that are not the identity."""
    generator = torch.Generator().manual_seed(0)
    for bn in module.modules():
        if isinstance(bn, nn.BatchNorm2d):
            for tensor in (bn.weight.data, bn.bias.data, bn.running_mean, bn.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval()


def image(*shape: int) -> Tensor:
    """The same numbers in 0 … 1 every time."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "block", [Conv(4, 8, 3), DWConv(4, 8, 3), C3(4, 8, 2, conv=DepthwiseSeparableConv), Focus(4, 8, 3), Elan(4, 16, 2)]
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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (5, 1, 1), (5, 2, 2), (31, 1, 1)])
def test_a_depthwise_convolution_trains_in_bfloat16_as_in_float32(
    kernel: int, stride: int, dilation: int, frozen: bool
) -> None:
    block, x = DWConv(8, 8, kernel, stride, dilation), torch.randn(2, 8, 10, 9, requires_grad=True)
    block.frozen_statistics = frozen
    exact = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = block(x)
        assert rounded.dtype == torch.bfloat16
        assert ("_DepthWise" in block.conv(x).grad_fn.name()) == (kernel * stride > 3)
    seen = torch.randn_like(rounded)
    gradients = (torch.autograd.grad(y, (x, *block.parameters()), seen.to(y.dtype)) for y in (rounded, exact))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        assert block.requires_grad_(False).conv(x.detach()).grad_fn is None


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


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shortcut", [True, False])
def test_joins_both_parts_and_every_step_of_the_chain(repeats: int, shortcut: bool) -> None:
    block = randomised(Elan(6, 16, repeats, shortcut))
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        parts = list(block.split(x).chunk(2, 1))
        for step in block.chain:
            parts.append(step.conv2(step.conv1(parts[-1])) + (parts[-1] if shortcut else 0))
        assert len(parts) == 2 + repeats
        torch.testing.assert_close(block(x), block.join(torch.cat(parts, 1)))


@pytest.mark.parametrize("block", [ConvElan(6, 16), ConvElan(6, 32, 0.5), RepElan(6, 16, 2), RepElan(6, 32, 1, 0.5)])
def test_joins_both_halves_and_both_stages(block: ConvElan | RepElan) -> None:
    randomised(block)
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        halves = block.cv1(x)
        parts = [halves[:, :8], halves[:, 8:]]
        for stage in (block.cv2, block.cv3):
            last = parts[-1]
            for step in stage if isinstance(stage, nn.Sequential) else [stage]:
                last = step(last)
            parts.append(last)
        torch.testing.assert_close(block(x), block.cv4(torch.cat(parts, 1)))


@pytest.mark.parametrize("kind", [ConvElan, RepElan])
@pytest.mark.parametrize(("c_out", "expansion"), [(6, 1.0), (8, 0.75), (8, 0.01)])
def test_halves_that_cannot_be(kind: type[ConvElan | RepElan], c_out: int, expansion: float) -> None:
    with pytest.raises(ValueError, match=rf"halves of {int(c_out * expansion)} channels \({c_out} by.*multiple of 4"):
        kind(4, c_out, expansion=expansion)


@pytest.mark.parametrize("sides", [(2, 2), (8, 12), (7, 9)])
def test_downsampling_of_a_mean_by_convolutions_and_a_maximum(sides: tuple[int, int]) -> None:
    x = image(2, 6, *sides) - 1  # a maximum with zeros around the map would be another
    mean = (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4
    first, second = mean.split(3, 1)
    maxima = F.pad(second, (1, 1, 1, 1), value=-torch.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5))
    one, two = randomised(AConv(6, 6)), randomised(ADown(6, 10))
    with torch.no_grad():
        assert one(x).shape == (2, 6, sides[0] // 2, sides[1] // 2)
        torch.testing.assert_close(one(x), one.conv(mean))
        torch.testing.assert_close(two(x), torch.cat((two.cv1(first), two.cv2(maxima)), 1))


def test_odd_channels_in_a_model_are_named_with_their_line() -> None:
    """A layer makes a multiple of 8, so that only the images can have an odd number."""
    head = [[[0], 1, "DetectFree", ["nc"]]]
    with pytest.raises(ConfigError, match=r"ADown.*halves of 3 and 8 channels, expected even numbers"):
        DetectionModel({"nc": 2, "backbone": [[-1, 1, "ADown", [8]]], "head": head})


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
