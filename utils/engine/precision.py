"""Mixed precision: which type to compute in, and whether it can be trusted here."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.errors import ConfigError
from utils.ranks.world import World

log = logging.getLogger(__name__)


class Precision:
    """Autocast and loss scaling as one object; with fp32 both do nothing.

    Attributes:
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        scaler: enabled for float16 alone, which underflows without it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in `dtype` inside."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def name(self) -> str:
        """bf16, fp16 or fp32."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]


def choose_precision(amp: str, world: World, model: nn.Module, images: Tensor) -> Precision:
    """Precision for `--amp`, the same on every rank.

    auto: bfloat16 where the hardware has it, else float16 on CUDA, else float32; and float32 on all ranks where a
    forward of `model` in the lower precision is not finite or far from float32 on any (some GPUs compute NaN).

    Args:
        amp: auto, bf16, fp16 or off.
        world: this rank; its device decides.
        model: on the device; left as it is.
        images: float (B, 3, H, W) in [0, 1], for the trial.

    Raises:
        ConfigError: fp16 without CUDA.
    """
    device = world.device
    if amp == "fp16" and device.type != "cuda":
        raise ConfigError(f"--amp fp16 needs a CUDA device, this run is on {device.type}. Use --amp auto.")
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}.get(amp) or _native(device)
    # The narrowest of the ranks' choices serves all: gradients are averaged between like and like.
    choices = world.all_gather(str(wanted))
    if len(set(choices)) > 1:
        wanted = torch.float32
    precision = Precision(device, wanted)
    if amp == "auto" and wanted != torch.float32:
        sound = world.all_gather(_sound(precision, model, images))
        if not all(sound):
            bad = [rank for rank, good in enumerate(sound) if not good]
            log.warning("%s gives wrong numbers on rank %s: training in fp32 instead", precision.name, bad)
            return Precision(device, torch.float32)
    return precision


def half_precision(device: torch.device) -> Precision:
    """What `--half` means on `device`: float16 on CUDA, else bfloat16 where native, else float32, with a word of it."""
    dtype = torch.float16 if device.type == "cuda" else _native(device)
    if dtype == torch.float32:
        log.warning("--half: no native half precision on %s, using fp32", device.type)
    return Precision(device, dtype)


def _native(device: torch.device) -> torch.dtype:
    """The type that `device` computes fastest without emulation."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (x86 flags as Linux lists them; elsewhere no)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return False
    flags = next((line for line in path.read_text().splitlines() if line.startswith("flags")), "")
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


@torch.no_grad()
def _sound(precision: Precision, model: nn.Module, images: Tensor) -> bool:
    """Whether a forward in the lower precision is finite and near the one in fp32."""
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
