"""Blocks with random statistics, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def parameters(module: nn.Module) -> int:
    """Numbers that training can change."""
    return sum(p.numel() for p in module.parameters())


def assert_learns_in_half_precision(block: nn.Module, *shape: int) -> None:
    """In bf16 and channels-last, every parameter of a block gets a gradient, and its input a finite one."""
    block = block.to(memory_format=torch.channels_last).train()
    x = image(*shape).contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    y.float().square().mean().backward()
    assert [name for name, p in block.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert x.grad is not None and bool(x.grad.isfinite().all())
