"""The host, for computing on it: its processor, threads that compute side by side, and the C library's memory."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

# Instructions for matrices that runtimes choose their kernels by, as Linux names them.
_INSTRUCTIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
MOST_AT_ONCE = 8  # pictures, each of which needs memory of its own
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


class Processor(NamedTuple):
    """What computes where there is no other device.

    Attributes:
        name: of its maker.
        instructions: those that it has of `_INSTRUCTIONS`; () where the system does not say.
    """

    name: str
    instructions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.instructions)})" if self.instructions else self.name


def processor() -> Processor:
    """This host's; its instructions as Linux lists them for x86."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = said.get("flags", "").split()
    name = said.get("model name") or platform.processor() or platform.machine()
    return Processor(name, tuple(one for one in _INSTRUCTIONS if one in flags))


def at_once() -> int:
    """How many threads that compute side by side suit this process: as many as torch has for one operation."""
    return min(torch.get_num_threads(), MOST_AT_ONCE)


@contextmanager
def threads_apart(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of `count` threads, in each of which torch computes alone, without dividing an operation among others.

    On the way out what has not begun is dropped, and what has begun is waited for.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # what one thread sets, the last of them now, is what later ones begin with


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, for the next step needs as much again.

    By default glibc maps every large block anew and gives it back when it is freed: activations and gradients then
    arrive page by page through the kernel, which zeroes them, in each step. That costs a fifth of a training step on
    the CPU. The process stays as large as it has ever been. Without glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
