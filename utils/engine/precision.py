"""Mixed precision: choice of the compute type, and a check that the device computes it correctly."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tessera.utils.errors import ConfigError
from tessera.utils.machine.accelerator import Accelerator
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
