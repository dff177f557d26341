"""Prefetching: images are decoded in a thread, and several are detected concurrently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice, takewhile
from typing import Any, TypeVar

from tessera.utils.machine.host import single_threaded_pool

T = TypeVar("T")
R = TypeVar("R")

_READY = 2  # most prefetched items
_END = object()


@contextmanager
def prefetch(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterate over `items` in a thread, which ends with the context; their errors are raised in order."""
    with ThreadPoolExecutor(1, "prefetch") as pool:
        try:
            rest = iter(items)
            begun: Iterator[Future[Any]] = (pool.submit(next, rest, _END) for _ in count())
            yield takewhile(lambda item: item is not _END, _results(begun, _READY))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def detect_ahead(items: Iterable[T], detect: Callable[[T], R], threads: int) -> Iterator[Iterator[tuple[T, R]]]:
    """Yield each item with `detect(item)`, in order; errors of both are raised in order.

    `items` are iterated in the caller's thread, and `detect` is called in `threads` others, which end with the context;
    with 1 in the caller's too.
    """
    if threads == 1:
        yield ((item, detect(item)) for item in items)
        return
    with single_threaded_pool(threads, "detection") as pool:
        yield _results(_begun(pool, items, detect), threads)


def _begun(pool: ThreadPoolExecutor, items: Iterable[T], detect: Callable[[T], R]) -> Iterator[Future[tuple[T, R]]]:
    try:
        for item in items:
            yield pool.submit(lambda item: (item, detect(item)), item)
    except Exception as error:  # raised in order
        failed = Future[tuple[T, R]]()
        failed.set_exception(error)
        yield failed


def _results(begun: Iterator[Future[T]], ready: int) -> Iterator[T]:
    """Yield results in order while `ready` more are computed."""
    waiting = deque(islice(begun, ready + 1))
    while waiting:
        result = waiting.popleft().result()
        yield result
        del result  # frees memory while waiting
        waiting.extend(islice(begun, 1))
