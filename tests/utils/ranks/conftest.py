"""A watchdog and heartbeats that only say what they would end the process with, and a store that counts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from tessera.utils.ranks import liveness
from tessera.utils.ranks.liveness import Watchdog

SERVER = "rank 0 on a, which keeps the job's store,"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process would have ended with; both threads look every 20 ms."""
    found: list[str] = []
    monkeypatch.setattr(liveness, "exit_at_once", lambda rank, message, code: found.append(message))
    monkeypatch.setattr(liveness, "INTERVAL_S", 0.02)
    monkeypatch.setattr(liveness, "NOTICE_S", 0.05)
    monkeypatch.setattr(liveness, "GRACE_S", 0.1)
    return found


@pytest.fixture
def guard(said: list[str]) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(1, SERVER)) as made:
        yield made


def until(ready: Callable[[], object]) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert ready()


def _counted(name: str) -> Any:
    """A method of Store, counted."""

    def call(self: CountedStore, *args: Any) -> Any:
        with self._lock:
            self.asked[name] += 1
        return getattr(self._store, name)(*args)

    return call


class CountedStore(Store):
    """`store`, or one in memory; calls by name are counted in `asked`, of all ranks that share that."""

    def __init__(self, store: Store | None = None, asked: Counter[str] | None = None) -> None:
        super().__init__()
        self._store = HashStore() if store is None else store
        self.asked: Counter[str] = Counter() if asked is None else asked
        self._lock = threading.Lock()

    set, add, compare_set = _counted("set"), _counted("add"), _counted("compare_set")
    get, multi_get, check = _counted("get"), _counted("multi_get"), _counted("check")
