"""Files of a long list, read in chunks: by one thread, and by several where the storage is slow.

From the memory of a local file system one thread is fastest: more of them wait for the interpreter, which one at a time
holds. Where the storage is slow (a cold disk, a network) most of the time is waiting, and threads help. Processes would
gain little, take time to start, and must not be forked from a process that already runs CUDA or communication threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 16


def in_chunks(read: Callable[[int, int], T], count: int, length: int, slow_s: float) -> list[T]:
    """`read(start, end)` of each chunk of 0 … `count`, in order.

    Args:
        read: reads the files from `start` to before `end`.
        count: files in all.
        length: files of a chunk.
        slow_s: seconds a file; as soon as a chunk has taken longer, threads read the others.
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
        with ThreadPoolExecutor(_THREADS) as pool:
            found += pool.map(lambda chunk: read(*chunk), rest)
    return found
