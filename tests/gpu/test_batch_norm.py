"""The CUDA kernels between which BatchNorm's statistics are summed compute what plain torch does."""

from __future__ import annotations

import pytest
import torch

from tessera.utils.machine.accelerator import BatchNormParts, FusedBatchNormParts


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fused_parts_are_the_plain_ones(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    x, dy = (
        (torch.randn(6, 16, 10, 12, **options) * 2 + shift).to(dtype).contiguous(memory_format=memory_format)
        for shift in (3, 0)
    )
    x[:, 3] = 1  # a constant channel
    weight, bias = torch.rand(16, **options), torch.rand(16, **options)
    plain, fused = BatchNormParts(), FusedBatchNormParts()
    count, shift = 6 * 10 * 12, torch.full((16,), 2.9, device="cuda")
    mine, theirs = (parts.statistics(x, shift) / count for parts in (plain, fused))
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    offset, squares = mine.view(2, -1)
    mean, inv_std = (shift + offset).float(), torch.rsqrt(squares - offset.square() + 1e-3).float()
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps + 1e-4, "atol": 1e-3}
    ours, theirs = (parts.normalise(x, weight, bias, mean, inv_std) for parts in (plain, fused))
    assert theirs.dtype == dtype and theirs.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(theirs, ours, **tolerance)
    (*sums, normal), (*others, kept) = (parts.sums(dy, x, mean, inv_std, weight) for parts in (plain, fused))
    torch.testing.assert_close(others, sums, rtol=1e-3, atol=1e-2)
    means = ((sums[0] / count).float(), (sums[1] / count).float())
    ours = plain.gradient(dy, normal, (mean, inv_std), weight, means)
    theirs = fused.gradient(dy, kept, (mean, inv_std), weight, means)
    assert theirs.dtype == dtype
    torch.testing.assert_close(theirs, ours, **tolerance)
