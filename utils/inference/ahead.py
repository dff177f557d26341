"""The next items are made in a thread while the ones before are worked on: a file is decoded beside the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

T = TypeVar("T")

_READY = 2  # items that may be ready
_END = object()


@contextmanager
def read_ahead(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """The same items in their order, from inside `with`; the thread has ended when that is left.

    Args:
        items: iterated in the thread, from the first iteration here on. What it raises is raised here.
    """
    with ThreadPoolExecutor(1, "reading ahead") as pool:
        try:
            yield _made_in(pool, iter(items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _made_in(pool: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    waiting = deque(pool.submit(next, items, _END) for _ in range(_READY))
    while (item := waiting.popleft().result()) is not _END:
        waiting.append(pool.submit(next, items, _END))
        yield cast(T, item)
