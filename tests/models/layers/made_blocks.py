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
