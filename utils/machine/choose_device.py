"""Choice of a rank's device by `--device`."""

from __future__ import annotations

import torch

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.cuda import Cuda, Metal
from tessera.utils.text import plural


def choose_accelerator(device: str, launch: Launch) -> Accelerator:
    """Return the device of this rank; raise ConfigError for an unknown or missing one, or several for one process."""
    word = device.strip().lower().replace("cuda:", "").replace(" ", "")
    if word == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("--device mps: no Metal device here. Use --device cpu.")
        return Metal()
    present = _cuda_devices()
    if word == "cpu" or (word in ("", "cuda") and present == 0):
        if word == "cuda":
            raise ConfigError("--device cuda: torch detects no CUDA device. Use --device cpu, or fix the driver.")
        return Accelerator()
    try:
        numbers = [int(part) for part in word.split(",")] if word not in ("", "cuda") else list(range(present))
    except ValueError:
        raise ConfigError(f"--device {device}: expected cpu, mps, or numbers such as 0 or 0,1.") from None
    if launch.size == 1 and len(numbers) > 1 and word not in ("", "cuda"):
        raise ConfigError(
            f"--device {device}: one process uses one device. Give one, or for train, val and compare start a process "
            f"per device: torchrun --standalone --nproc-per-node {len(numbers)} …"
        )
    missing = [number for number in numbers if not 0 <= number < present]
    if missing:
        others = f", or numbers from 0 to {present - 1}" if present else ""
        raise ConfigError(
            f"--device {device}: there is no CUDA device {missing[0]}; torch detects {present}. Use --device "
            f"cpu{others}."
        )
    # With `srun --gpus-per-task=1` each task sees one device, its own; `require_own_devices` compares them.
    place = 0 if launch.size == 1 or len(numbers) == 1 else launch.local_rank
    if place >= len(numbers):
        raise ConfigError(
            f"local rank {place} has no device: this node has {plural(len(numbers), 'device')}. Start at most "
            f"{plural(len(numbers), 'rank')} per node, or use --device cpu.",
            reporter=launch.rank,  # other ranks have devices
        )
    return Cuda(torch.device("cuda", numbers[place]))


def default_device() -> str:
    """Return the device of a run without `--device`, for `--help`; no device is initialised."""
    present = _cuda_devices()
    return f"cuda ({present} present)" if present else "cpu"


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator of a torch device."""
    return {"cpu": Accelerator, "cuda": Cuda, "mps": Metal}[device.type](device)
