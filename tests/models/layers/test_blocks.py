"""Basic blocks of model YAMLs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.models.layers.blocks import C3, SILU, SPP, SPPF, Conv, DepthwiseSeparableConv, DWConv, Focus, concat
from tessera.models.layers.elan import Elan
from tests.models.layers.made_blocks import image, randomised


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
