"""The host: its processor, threads that compute or read side by side, the C library's memory, namespaces."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_READERS = 16  # threads
MOST_AT_ONCE = 8  # pictures, each of which needs memory of its own
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; {} elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def in_chunks(read: Callable[[int, int], T], count: int, length: int, slow_s: float) -> list[T]:
    """`read(start, end)` of each chunk of `length` of `count` files, in order.

    One thread reads, which is fastest from memory or a local disk, for threads wait for Python's lock; as soon as a
    chunk has taken longer than `slow_s` a file, several read the others. Processes must not be forked here, where CUDA
    or communication threads run.
    """
    chunks = [(start, min(start + length, count)) for start in range(0, count, length)]
    found: list[T] = []
    for start, end in chunks:
        began = time.perf_counter()
        found.append(read(start, end))
        if time.perf_counter() - began > slow_s * (end - start):
            break
    rest = chunks[len(found) :]
    if rest:
        with ThreadPoolExecutor(_READERS) as pool:
            found += pool.map(lambda chunk: read(*chunk), rest)
    return found


def namespace(kind: str) -> str:
    """Name of a namespace ("pid": process ids, "net": network interfaces), the same where processes share it alone.

    Containers of one host have their own, and every boot has others. Without spaces; "" but on Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""
