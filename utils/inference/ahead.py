"""What comes next is read and looked at in threads while what came before is worked on: a file is decoded beside the
network, and several pictures are looked at at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")

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


@contextmanager
def found_ahead(items: Iterable[T], find: Callable[[T], R], at_once: int) -> Iterator[Iterator[tuple[T, R]]]:
    """Each item with what is found on it, in their order, from inside `with`; the threads have ended when that is left.

    Args:
        items: iterated in the caller's thread. What that raises is raised here, after the items before it.
        find: what is done with each. What it raises is raised here, in the item's place.
        at_once: threads that call it; 1 = the caller's own.
    """
    if at_once == 1:
        yield ((item, find(item)) for item in items)
        return
    with ThreadPoolExecutor(at_once, "finding ahead") as pool:
        try:
            yield _found_in(pool, iter(items), find, at_once + 1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _found_in(
    pool: ThreadPoolExecutor, items: Iterator[T], find: Callable[[T], R], ready: int
) -> Iterator[tuple[T, R]]:
    begun = _begun(pool, items, find)
    waiting = deque(islice(begun, ready))
    while waiting:
        item, found = waiting.popleft()
        yield item, found.result()
        waiting.extend(islice(begun, 1))


def _begun(pool: ThreadPoolExecutor, items: Iterator[T], find: Callable[[T], R]) -> Iterator[tuple[T, Future[R]]]:
    """Each item with what will be found; an error of the items waits for its turn as one of finding does."""
    try:
        for item in items:
            yield item, pool.submit(find, item)
    except Exception as error:
        failed = Future[R]()
        failed.set_exception(error)
        yield cast(T, None), failed
