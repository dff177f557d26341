"""Summary of the job's ranks, devices and free space in the log before the start, with warnings."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from tessera.utils.environment import cache_dir
from tessera.utils.files import SHARED_MEMORY, working_directory
from tessera.utils.ranks.world import World
from tessera.utils.text import gib, plural, row

log = logging.getLogger(__name__)

_PROBE_BYTES = 8 * 2**20
_SLOW_MIB_S = 100.0
_SMALL_SHM = 64 * 2**20
_SMALL_DISK = 2 * 2**30


class Host(NamedTuple):
    """Host of one rank; sizes in bytes, None without /dev/shm."""

    name: str
    device: str
    shm_free: int | None
    disk_free: int


def preflight(world: World, folder: Path) -> None:
    """Log ranks per host, devices, the speed of an all-reduce, free /dev/shm and disk; all ranks call this."""
    speed = _all_reduce_mib_s(world)
    cache = next(p for p in (cache_dir(), *cache_dir().parents) if p.is_dir())
    here = Host(
        socket.gethostname(),
        world.accelerator.name,
        shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        min(shutil.disk_usage(place).free for place in (cache, working_directory() or cache, folder) if place.is_dir()),
    )
    hosts = world.all_gather(here)
    if not world.is_main:
        return
    ranks = ", ".join(f"{count} on {name}" for name, count in Counter(host.name for host in hosts).items())
    line = f"{plural(world.size, 'rank')} ({ranks}), {', '.join(sorted({host.device for host in hosts}))}"
    if world.size > 1:
        line += f", {world.accelerator.backend} all-reduce {speed:,.0f} MiB/s"
    shm = min((h.shm_free for h in hosts if h.shm_free is not None), default=None)
    line += f"; free: /dev/shm {'none' if shm is None else gib(shm)}, disk {gib(min(h.disk_free for h in hosts))}"
    log.info(row("Device", line))
    for advice in advise(hosts, speed, world.size):
        log.warning(advice)


def _all_reduce_mib_s(world: World) -> float:
    """Return the speed of an all-reduce in MiB/s; infinite with a single rank."""
    if world.size == 1:
        return float("inf")
    probe = torch.zeros(_PROBE_BYTES // 4, device=world.device)
    world.sum(probe)  # the first one sets up connections
    world.accelerator.synchronize()
    started = time.perf_counter()
    world.sum(probe)
    world.accelerator.synchronize()
    return _PROBE_BYTES / 2**20 / (time.perf_counter() - started)


def advise(hosts: list[Host], speed_mib_s: float, size: int) -> list[str]:
    """Return a warning for each likely problem."""
    lines = []
    if size > 1 and speed_mib_s < _SLOW_MIB_S:
        lines.append(
            f"all-reduce runs at only {speed_mib_s:.0f} MiB/s. Check the network interface (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME); gradient accumulation sends less."
        )
    for host in {h.name: h for h in hosts}.values():
        if host.shm_free is not None and host.shm_free < _SMALL_SHM:
            lines.append(
                f"{host.name}: /dev/shm has only {gib(host.shm_free)}. Start the container with --shm-size=8g."
            )
        if host.disk_free < _SMALL_DISK:
            lines.append(f"{host.name}: only {gib(host.disk_free)} of disk are free for runs and caches.")
    if len({h.device for h in hosts}) > 1:
        lines.append("the ranks compute on different devices: the slowest one determines the speed.")
    return lines
