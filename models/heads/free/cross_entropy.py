"""The class loss over all cells, of targets that are few."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SoftCrossEntropy(torch.autograd.Function):
    """Binary cross-entropy, summed over all cells and classes, against targets that are 0 but for a few.

    Ignored cells have neither loss nor gradient; no target above 0 is in one.

    BCE(x, t) = softplus(x) − x t, and its gradient σ(x) − t. Left to autograd, the two terms would fill a dense
    gradient each (43 MB for 16 images at 640 pixels and 80 classes), to be added up afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, cells: Tensor, classes: Tensor, targets: Tensor, ignored: Tensor | None
    ) -> Tensor:
        """(N, C), (S,) where the targets are, which are added up, and bool (N,) or None; float32 ()."""
        ctx.save_for_backward(logits, cells, classes, targets, ignored)
        losses = F.softplus(logits.float())
        if ignored is not None:
            losses.masked_fill_(ignored[:, None], 0)
        return losses.sum() - (logits[cells, classes].float() * targets).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient of the logits, in their dtype."""
        logits, cells, classes, targets, ignored = ctx.saved_tensors
        dense = logits.float().sigmoid().contiguous()
        flat, place = dense.view(-1), cells * logits.shape[1] + classes
        # A place comes twice only where a target is 0, so that σ − t is the least of what is found for it, whatever
        # the order. Subtracting in place would wait: before an index_put_ that accumulates CUDA reads back the indices.
        flat.scatter_reduce_(0, place, flat[place] - targets, "amin")
        if ignored is not None:
            dense.masked_fill_(ignored[:, None], 0)
        return dense.mul_(grad).to(logits.dtype), None, None, None, None
