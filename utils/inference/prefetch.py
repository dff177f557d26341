"""What comes next is read and looked at in threads while what came before is worked on: a file is decoded beside the
network, and several pictures are looked at at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice, takewhile
from typing import Any, TypeVar

from tessera.utils.machine.host import threads_apart

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
            rest = iter(items)
            begun: Iterator[Future[Any]] = (pool.submit(next, rest, _END) for _ in count())
            yield takewhile(lambda item: item is not _END, _results(begun, _READY))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def found_ahead(items: Iterable[T], find: Callable[[T], R], at_once: int) -> Iterator[Iterator[tuple[T, R]]]:
    """Each item with what is found on it, in their order, from inside `with`; the threads have ended when that is left.

    Args:
        items: iterated in the caller's thread. What that raises is raised here, after the items before it.
        find: what is done with each. What it raises is raised here, in the item's place.
        at_once: threads that call it, each of which computes alone; 1 = the caller's own.
    """
    if at_once == 1:
        yield ((item, find(item)) for item in items)
        return
    with threads_apart(at_once, "finding ahead") as pool:
        yield _results(_begun(pool, items, find), at_once)


def _begun(pool: ThreadPoolExecutor, items: Iterable[T], find: Callable[[T], R]) -> Iterator[Future[tuple[T, R]]]:
    try:
        for item in items:
            yield pool.submit(lambda item: (item, find(item)), item)
    except Exception as error:  # waits for its turn as one of finding does
        failed = Future[tuple[T, R]]()
        failed.set_exception(error)
        yield failed


def _results(begun: Iterator[Future[T]], ready: int) -> Iterator[T]:
    """What comes of them in order; so many are begun beside the one that is used."""
    waiting = deque(islice(begun, ready + 1))
    while waiting:
        result = waiting.popleft().result()
        yield result
        del result  # nothing is kept while the next one is awaited
        waiting.extend(islice(begun, 1))
