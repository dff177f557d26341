"""Exponential moving average of a model: what is validated and kept as the best."""

from __future__ import annotations

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

DECAY, WARMUP = 0.9999, 2000.0  # the largest decay; updates after which 63 % of it is reached


def ema_decay(updates: int, share: float = 0.0) -> float:
    """Weight of the old average in update number `updates`, from 1.

    It grows, so that the average follows early training. YOLOv5's 0.9999 (1 − exp(−n / 2000)) suits a hundred thousand
    updates; after a few hundred it averages nothing. With a share the average reaches back over that share of all
    updates so far, however few: d = min(0.9999, 1 − 1 / (1 + share · n)). PaddleDetection's (1 + n) / (10 + n), its n
    from 0, is a share of 1/9.
    """
    if share == 0:
        return DECAY * (1 - math.exp(-updates / WARMUP))
    return min(DECAY, 1 - 1 / (1 + share * updates))


class ModelEMA(Generic[M]):
    """Average over all floating-point state of a raw model, parameters and buffers, in fp32; `share` as in `ema_decay`.

    Attributes:
        model: the averaged copy, in evaluation mode, without gradients.
        updates: how many updates it has seen.
    """

    def __init__(self, model: M, share: float = 0.0) -> None:
        self.model: M = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0
        self._share = share
        self._pairs: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] | None = None

    def decay(self) -> float:
        """Weight of the old average in the latest update."""
        return ema_decay(self.updates, self._share)

    @torch.no_grad()
    def update(self, model: nn.Module, taken: Tensor | bool = True) -> None:
        """Move the average towards the state of the raw `model`, and count the update.

        Args:
            model: the same module in every call; its state is finite.
            taken: whether the optimizer took its step; if not, the average stays. A bool () tensor on the model's
                device costs two more passes over the state, but no host synchronisation. The host learns of a skipped
                step later, and then calls `take_back`.
        """
        self.updates += 1
        if self._pairs is None:
            self._pairs = _pair_state(self.model, model)
        averages, values, kept, copied = self._pairs
        share = 1 - self.decay()
        if isinstance(taken, Tensor):
            move(averages, values, taken * share)
        else:
            torch._foreach_lerp_(averages, values, share * taken)
        if kept:
            torch._foreach_copy_(kept, copied)

    def take_back(self) -> None:
        """Count one update less, for a step that was skipped."""
        self.updates -= 1


@torch.no_grad()
def move(averages: list[Tensor], values: list[Tensor], share: Tensor) -> None:
    """Move averages towards values by a share, a scalar on their device, without a host synchronisation."""
    steps = torch._foreach_sub(values, averages)
    torch._foreach_mul_(steps, share)
    torch._foreach_add_(averages, steps)


def _pair_state(average: nn.Module, model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """The state tensors of both, side by side: floating-point ones (averaged), the others (copied)."""
    averages = {key: value.detach() for key, value in average.state_dict(keep_vars=True).items()}
    values = {key: value.detach() for key, value in model.state_dict(keep_vars=True).items()}
    floats = [key for key, value in averages.items() if value.is_floating_point()]
    others = [key for key, value in averages.items() if not value.is_floating_point()]
    return (
        [averages[key] for key in floats],
        [values[key] for key in floats],
        [averages[key] for key in others],
        [values[key] for key in others],
    )
