"""Threads that compute side by side, each alone: torch divides no operation among others in them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

MOST_AT_ONCE = 8  # pictures, each of which needs memory of its own


def at_once() -> int:
    """How many such threads suit this process: as many as torch has for one operation."""
    return min(torch.get_num_threads(), MOST_AT_ONCE)


@contextmanager
def threads_apart(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of `count` threads. On the way out what has not begun is dropped, and what has begun is waited for."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(count, name, torch.set_num_threads, (1,)) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            torch.set_num_threads(before)  # what one thread sets is what later ones begin with
