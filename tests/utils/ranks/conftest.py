"""Fixtures for watchdog and heartbeats that record messages instead of ending the process; a store that counts."""

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

SERVER = "rank 0 on a, which serves the job's store,"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages with which the process would have ended; both threads act every 20 ms."""
    messages: list[str] = []
    monkeypatch.setattr(liveness, "exit_immediately", lambda rank, message, code: messages.append(message))
    for name, seconds in {"INTERVAL_S": 0.02, "NOTICE_S": 0.05, "GRACE_S": 0.1}.items():
        monkeypatch.setattr(liveness, name, seconds)
    return messages


@pytest.fixture
def guard(messages: list[str]) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(1, SERVER)) as made:
        yield made


def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert ready()


class CountedStore:
    """`store`, or one in memory, with calls by name counted in `calls`."""

    def __init__(self, store: Store | None = None, calls: Counter[str] | None = None) -> None:
        self._store = HashStore() if store is None else store
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return call
