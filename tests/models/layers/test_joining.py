"""Maps end to end."""

from __future__ import annotations

import pytest
import torch

from tessera.models.layers.blocks import joined


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dim", [1, -1])
def test_value_and_gradients_are_those_of_cat_and_dense(layout: torch.memory_format, dim: int) -> None:
    maps = [torch.randn(2, 3, 4, 5).to(memory_format=layout).requires_grad_() for _ in range(3)]
    whole, expected = joined(maps, dim), torch.cat(maps, dim)
    assert torch.equal(whole, expected)
    seen = torch.randn_like(whole)
    ours, theirs = (torch.autograd.grad(output, maps, seen) for output in (whole, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.equal(gradient, right) and gradient.is_contiguous(memory_format=layout)


def test_dtypes_that_differ_give_each_map_a_gradient_of_its_own() -> None:
    maps = [torch.randn(1, 2, 3, 3, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32)]
    gradients = torch.autograd.grad(joined(maps).sum(), maps)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
