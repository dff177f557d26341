"""The next items are made in a thread while the ones before are worked on: a file is decoded beside the network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_LOOK_S = 0.2  # how often a thread that waits for room looks whether it is still wanted


class Ahead(Generic[T]):
    """The same items in their order, from inside `with`; the thread has ended when that is left.

    Args:
        items: iterated in the thread, from the first iteration here on. What it raises is raised here.
        count: items that may be ready.
    """

    def __init__(self, items: Iterable[T], count: int = 2) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reading ahead", daemon=True)

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        while (found := self._ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]

    def _work(self) -> None:
        last: BaseException | None = None
        try:
            for item in self._items:
                if not self._put((item,)):
                    return
        except BaseException as error:  # of the items: for whoever iterates
            last = error
        self._put(last)

    def _put(self, found: tuple[T] | BaseException | None) -> bool:
        """Wait for room; False where nobody wants more."""
        while not self._stopped.is_set():
            try:
                self._ready.put(found, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
