"""A watchdog and heartbeats that only say what they would end the process with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

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
