"""Maps end to end."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def joined(maps: list[Tensor] | tuple[Tensor, ...], dim: int = 1) -> Tensor:
    """Maps that agree in all but `dim` to one."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.cat(maps, dim)
    return cast(Tensor, _Joined.apply(dim, *maps))


class _Joined(torch.autograd.Function):
    """torch.cat, whose backward gives each map a gradient with memory of its own.

    Torch's gives it a part of the whole gradient, where a pixel's few channels lie apart from the next pixel's. On a
    CPU the backward of what comes before is several times slower then: an activation's takes one number after the
    other, and upsampling copies the part to channels first and back. The numbers are the same.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, *maps: Tensor) -> Tensor:
        """The maps as one."""
        ctx.dim, ctx.sizes = dim, [x.shape[dim] for x in maps]
        return torch.cat(maps, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The maps' gradients, as dense as that of the whole and in the same order in memory."""
        return None, *(part.clone() for part in grad.split(ctx.sizes, ctx.dim))
