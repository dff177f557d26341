"""Where a rank computes."""

from __future__ import annotations

import torch

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.cuda import Cuda, Metal
from tessera.utils.text import counted


def choose_accelerator(device: str, launch: Launch) -> Accelerator:
    """What this rank computes on; a ConfigError where it is no device, not present, or several without a launcher."""
    word = device.strip().lower().replace("cuda:", "").replace(" ", "")
    if word == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("--device mps: no Metal device here. Use --device cpu.")
        return Metal()
    present = _cuda_devices()
    if word == "cpu" or (word in ("", "cuda") and present == 0):
        if word == "cuda":
            raise ConfigError("--device cuda: torch finds no CUDA device. Use --device cpu, or fix the driver.")
        return Accelerator()
    try:
        numbers = [int(part) for part in word.split(",")] if word not in ("", "cuda") else list(range(present))
    except ValueError:
        raise ConfigError(f"--device {device}: expected cpu, mps, or numbers such as 0 or 0,1.") from None
    if launch.size == 1 and len(numbers) > 1 and word not in ("", "cuda"):
        raise ConfigError(
            f"--device {device}: one process computes on one device. For all of them start one process each: "
            f"torchrun --standalone --nproc-per-node {len(numbers)} -m tessera train --device {device} …"
        )
    missing = [number for number in numbers if not 0 <= number < present]
    if missing:
        others = f", or numbers from 0 to {present - 1}" if present else ""
        raise ConfigError(
            f"--device {device}: there is no CUDA device {missing[0]}; torch finds {present}. Use --device cpu{others}."
        )
    # `srun --gpus-per-task=1`: each task sees one, which is its own; ranks compare them later
    place = 0 if launch.size == 1 or len(numbers) == 1 else launch.local_rank
    if place >= len(numbers):
        raise ConfigError(
            f"local rank {place} has no device: {counted(launch.local_size, 'rank')} on this node, but {len(numbers)} "
            f"devices. Start at most {len(numbers)} ranks a node, or use --device cpu.",
            reporter=launch.rank,  # the first ranks have devices and see no mistake
        )
    return Cuda(torch.device("cuda", numbers[place]))


def device_by_itself() -> str:
    """What a run without --device computes on, in words; no device is opened for it."""
    present = _cuda_devices()
    return f"cuda ({present} present)" if present else "cpu"


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator that torch knows as `device`."""
    kinds = {kind.kind: kind for kind in (Accelerator, Cuda, Metal)}
    return kinds[device.type](device)
