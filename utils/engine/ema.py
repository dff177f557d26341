"""Exponential moving average (EMA) of a model: the weights that are validated and saved as best.pt."""

from __future__ import annotations

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

DECAY, WARMUP = 0.9999, 2000.0  # largest decay; updates until 63 % of it


def ema_decay(updates: int, share: float = 0.0) -> float:
    """Return the weight of the old average in update number `updates`, from 1.

    The decay grows, so that the average follows early training. Without `share` it is YOLOv5's
    0.9999 (1 − exp(−n / 2000)), which suits a hundred thousand updates. With `share`, the average covers that fraction
    of all updates so far: d = min(0.9999, 1 − 1 / (1 + share · n)).
    """
    if share == 0:
        return DECAY * (1 - math.exp(-updates / WARMUP))
    return min(DECAY, 1 - 1 / (1 + share * updates))


class ModelEMA(Generic[M]):
    """EMA over all floating-point parameters and buffers of a model, in fp32; `share` as in `ema_decay`."""

    def __init__(self, model: M, share: float = 0.0) -> None:
        self.model: M = copy.deepcopy(model).eval().requires_grad_(False)  # the averaged copy
        self.updates = 0
        self._share = share
        self._pairs: tuple[list[Tensor], ...] | None = None

    @torch.no_grad()
    def update(self, model: nn.Module, taken: Tensor | bool = True) -> None:
        """Move the average towards the state of the raw `model`, and count the update.

        `model` is the same module in every call. Without `taken`, whether the optimizer took its step, the average
        stays. As a bool () tensor on the model's device it needs no host synchronisation; the caller then calls
        `undo_update` once it knows that a step was skipped.
        """
        self.updates += 1
        if self._pairs is None:  # floating-point tensors are averaged, the others copied
            both = self.model.state_dict(), model.state_dict()  # the tensors themselves, detached
            names = ([k for k, v in both[0].items() if v.is_floating_point() is real] for real in (True, False))
            self._pairs = tuple([state[name] for name in half] for half in names for state in both)
        averages, values, others, copied = self._pairs
        weight = 1 - ema_decay(self.updates, self._share)
        if isinstance(taken, Tensor):
            steps = torch._foreach_sub(values, averages)
            torch._foreach_mul_(steps, taken * weight)
            torch._foreach_add_(averages, steps)
        else:
            torch._foreach_lerp_(averages, values, weight * taken)
        if others:
            torch._foreach_copy_(others, copied)

    def undo_update(self) -> None:
        """Undo the count of an update whose step was skipped."""
        self.updates -= 1
