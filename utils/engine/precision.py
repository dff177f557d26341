"""Mixed precision: choice of the compute type, and a check that the device computes it correctly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tessera.models.layers.blocks import Conv
from tessera.utils.errors import ConfigError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.ddp import message_parts
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)


class Precision:
    """Autocast and loss scaling; both do nothing in fp32."""

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        self.accelerator, self.dtype = accelerator, dtype
        self.scaler = accelerator.gradient_scaler(dtype)  # enabled for float16 alone, which underflows without it

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context that computes in `dtype`."""
        return self.accelerator.autocast(self.dtype)

    @property
    def name(self) -> str:
        """Short name: bf16, fp16 or fp32."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]


class CastWeights:
    """A model's convolution weights in autocast's type, cast together: autocast takes two launches for each weight.

    Gradients are cast back together too, in parts like those that ranks send.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        in_float32 = {m.conv for m in model.modules() if isinstance(m, Conv) and m.frozen_statistics}
        convs = [m._parameters for m in model.modules() if isinstance(m, nn.Conv2d) and m not in in_float32]
        self._owners = {p: (own, name) for own in convs for name, p in own.items() if p is not None and p.requires_grad}
        self._parts, self._dtype = message_parts([*self._owners]), dtype

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the convolutions have the cast weights."""
        try:
            for part in self._parts:
                for weight, cast in zip(part, _Cast.apply(self._dtype, *part), strict=True):
                    own, name = self._owners[weight]
                    own[name] = cast
            yield
        finally:
            for weight, (own, name) in self._owners.items():
                own[name] = weight


class _Cast(torch.autograd.Function):
    """Several tensors in another type."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
        torch._foreach_copy_(made, tensors)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Cast.forward(ctx, torch.float32, *grads)


def choose_precision(amp: str, world: World, model: nn.Module, images: Tensor) -> Precision:
    """Return the precision for `--amp`, the same on every rank.

    auto: the accelerator's fastest type. All ranks fall back to float32 if a forward of `model` in the lower precision
    is not finite or far from float32 on any rank, as on some GPUs.

    Args:
        amp: auto, bf16, fp16 or off.
        world: the ranks.
        model, images: for the check, on the device; images float (B, 3, H, W) in [0, 1].

    Raises:
        ConfigError: fp16 without CUDA.
    """
    accelerator = world.accelerator
    if amp == "fp16" and not accelerator.computes_fp16:
        raise ConfigError(f"--amp fp16 needs a CUDA device, this run is on {accelerator.kind}. Use --amp auto.")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}.get(amp) or accelerator.native_dtype
    # Gradients can be averaged between equal types only.
    choices = world.all_gather(str(dtype))
    if len(set(choices)) > 1:
        dtype = torch.float32
    precision = Precision(accelerator, dtype)
    if amp == "auto" and dtype != torch.float32:
        sound = world.all_gather(_sound(precision, model, images))
        if bad := [rank for rank, good in enumerate(sound) if not good]:
            log.warning("%s computes wrong values on rank %s: training in fp32 instead.", precision.name, bad)
            return Precision(accelerator, torch.float32)
    return precision


def half_precision(accelerator: Accelerator) -> Precision:
    """Return the accelerator's 16-bit precision for `--half`; float32, with a warning, if it has none."""
    dtype = accelerator.half_dtype
    if dtype == torch.float32:
        log.warning("--half: no native half precision on %s; using fp32.", accelerator.kind)
    return Precision(accelerator, dtype)


@torch.no_grad()
def _sound(precision: Precision, model: nn.Module, images: Tensor) -> bool:
    """Return whether a forward in the lower precision is finite and close to fp32."""
    training = model.training
    model.eval()
    try:
        exact = model(images)[0].float()
        with precision.autocast():
            trial = model(images)[0].float()
    finally:
        model.train(training)
    scale = exact.abs().mean().clamp(min=1e-6)
    return bool(torch.isfinite(trial).all()) and float((trial - exact).abs().mean() / scale) < 0.1
