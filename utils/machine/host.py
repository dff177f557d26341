"""Host utilities: CPU info, thread pools for computing and reading, malloc settings, namespaces."""

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
MOST_AT_ONCE = 8  # images, each of which needs its own memory
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def cpuinfo() -> dict[str, str]:
    """Return /proc/cpuinfo of the first processor; {} on other systems than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def at_once() -> int:
    """Return the number of threads for concurrent inference: torch's threads, at most 8."""
    return min(torch.get_num_threads(), MOST_AT_ONCE)


@contextmanager
def single_threaded_pool(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `count` threads, in each of which torch uses one thread; on exit cancel pending work."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # new threads start with the number that any thread has set last


def keep_malloc_memory() -> None:
    """Let glibc's malloc keep freed memory for the next step; do nothing without glibc.

    By default it maps every large block again, and the kernel zeroes activations and gradients page by page in each
    step, which costs a fifth of a training step on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def in_chunks(read: Callable[[int, int], T], count: int, length: int, slow_s: float) -> list[T]:
    """Return `read(start, end)` for chunks of `length` of `count` files, in order.

    One thread is fastest from memory or a local disk. After a chunk that took longer than `slow_s` per file, several
    threads read the rest. Processes must not be forked here, beside CUDA or communication threads.
    """
    chunks = [(start, min(start + length, count)) for start in range(0, count, length)]
    results: list[T] = []
    for start, end in chunks:
        began = time.perf_counter()
        results.append(read(start, end))
        if time.perf_counter() - began > slow_s * (end - start):
            break
    if rest := chunks[len(results) :]:
        with ThreadPoolExecutor(_READERS) as pool:
            results += pool.map(lambda chunk: read(*chunk), rest)
    return results


def namespace(kind: str) -> str:
    """Return an id of this process's Linux namespace ("pid" or "net"), unique over hosts and boots; "" elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""
