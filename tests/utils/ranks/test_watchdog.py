"""Calls that do not return end the process, whatever hangs and whoever keeps the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from tessera.utils.ranks import watchdog
from tessera.utils.ranks.heartbeat import Heartbeat
from tessera.utils.ranks.watchdog import OwnTime, Watchdog, WatchedStore
from tests.system.launch import ROOT, free_port

KEEPER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listens", flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.02)
    monkeypatch.setattr(watchdog, "NOTICE_S", 0.05)
    monkeypatch.setenv("TESSERA_PEER_TIMEOUT", "0.3")


@pytest.fixture
def keeper() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a store, and its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", KEEPER, str(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"listens\n"
    yield process, port
    process.kill()
    process.wait()


def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    assert ready()


def test_a_call_that_returns_in_time_ends_nothing(guard: Watchdog, said: list[str]) -> None:
    for _ in range(20):
        with guard.over("Nobody", 0.2):
            time.sleep(0.03)
    assert said == []


def test_calls_that_look_alike_end_each_by_themselves(guard: Watchdog, said: list[str]) -> None:
    with guard.over("The store", 5):
        first, second = guard._calls[0], guard.over("The store", 5)
        with second:
            first.waited_s = guard._calls[1].waited_s
        assert guard._calls == [first] and guard._calls[0] is first
    assert not guard._calls


def test_a_call_that_hangs_is_announced_and_then_ends_the_process(
    guard: Watchdog, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with guard.over("rank 0 on a", 0.2, "Waiting for rank 0."):
        until(lambda: said)
    assert said[0].startswith("rank 0 on a has not answered for 0 s")
    assert capfd.readouterr().err == "Waiting for rank 0.\n"


def test_a_heartbeat_whose_store_is_frozen_ends_its_process(
    guard: Watchdog, said: list[str], keeper: tuple[subprocess.Popen[bytes], int]
) -> None:
    """The call itself never comes back, and holds no lock that the watchdog's thread needs."""
    process, port = keeper
    guard.keeper = process.pid
    timeout = timedelta(seconds=20)
    joined = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = WatchedStore(joined, guard, "rank 0 on a, which keeps the job's store,")
    beat = Heartbeat(store, 1, 2, "here", 60, lambda message, code: None)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: said)
    assert said[0].startswith("rank 0 on a, which keeps the job's store, has not answered")
    assert process.wait(60) == -signal.SIGKILL
    beat.close()


def test_the_time_for_which_a_process_was_stopped_itself_does_not_count() -> None:
    clock = OwnTime()
    time.sleep(0.3)
    assert clock.passed(0.01) == pytest.approx(0.03)


def test_a_rank_that_never_gives_a_sign_is_missed(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr("tessera.utils.ranks.heartbeat.INTERVAL_S", 0.02)
    beat = Heartbeat(HashStore(), 0, 2, "here", 0.2, lambda message, code: said.append(message))
    until(lambda: said)
    beat.close()
    assert said[0].startswith("rank 1 has given no sign of life for")


FULL = """
import os, sys, threading, time
from tessera.utils.ranks import watchdog
watchdog._PRINTING_S = 0.2
read, write = os.pipe()
os.dup2(write, 2)
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 65536)
except BlockingIOError: pass
os.set_blocking(2, True)
watchdog.leave(0, "nobody reads this", 3)
"""


def test_it_leaves_though_nobody_reads_what_it_prints() -> None:
    process = subprocess.Popen([sys.executable, "-c", FULL], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.wait(60) == 3
