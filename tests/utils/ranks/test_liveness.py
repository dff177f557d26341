"""Watchdog over calls that do not return, and heartbeats that detect dead and silent ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from tessera.utils.machine.host import namespace
from tessera.utils.ranks import liveness
from tessera.utils.ranks.liveness import AwakeClock, FirstFailure, Heartbeat, Status, Watchdog, lost_ranks_message
from tests.at_once import at_once
from tests.system.launch import ROOT, free_port
from tests.utils.ranks.conftest import SERVER, CountedStore, until

ADVISED: Any = SimpleNamespace(advised=str)  # a watchdog without advice
KEEPER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listens", flush=True)
time.sleep(100)
"""
FULL = """
import os
from tessera.utils.ranks import failures
failures._PRINTING_S = 0.2
read, write = os.pipe()
os.dup2(write, 2)
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 65536)
except BlockingIOError: pass
os.set_blocking(2, True)
failures.exit_immediately(0, "nobody reads this", 3)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a store, and its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", KEEPER, str(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"listens\n"
    yield process, port
    process.kill()
    process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def timeout(messages: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """TESSERA_PEER_TIMEOUT in seconds: the test's, else 60."""
    monkeypatch.setenv("TESSERA_PEER_TIMEOUT", str(getattr(request, "param", 60)))


soon = pytest.mark.parametrize("timeout", [0.3], indirect=True, ids=["soon"])


def status_of(pid: int, place: str, tick: int = 7) -> Status:
    return Status(tick, 3, "here", "training epoch 4", pid, place)


def beside(status: Status, store: HashStore | None = None) -> Heartbeat:
    """Rank 0 of two; the other one has published `status` alone."""
    store = store or HashStore()
    store.set("heartbeat/1", json.dumps(status))
    return Heartbeat(store, 0, 2, ADVISED)


def test_a_call_that_hangs_is_announced_and_then_ends_the_process(
    guard: Watchdog, messages: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with guard.watch("rank 0 on a", 0.2, "Waiting for rank 0."):
        until(lambda: messages)
    assert messages[0].startswith("rank 0 on a has not answered for 0 s")
    assert capfd.readouterr().err == "Waiting for rank 0.\n"


@soon
def test_a_heartbeat_whose_store_is_frozen_ends_its_process(
    guard: Watchdog, messages: list[str], server: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, port = server
    guard.server_pid = process.pid
    timeout = timedelta(seconds=20)
    joined = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    beat = Heartbeat(guard.watched(joined), 1, 2, guard)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: messages)
    assert messages[0].startswith(f"{SERVER} has not answered")
    assert process.wait(60) == -signal.SIGKILL
    beat.close()


def test_the_time_for_which_a_process_was_stopped_itself_does_not_count() -> None:
    clock = AwakeClock()
    time.sleep(0.3)
    assert clock.passed(0.01) == pytest.approx(0.03)


def test_it_leaves_though_nobody_reads_what_it_prints() -> None:
    process = subprocess.Popen([sys.executable, "-c", FULL], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.wait(60) == 3


def test_a_rank_that_is_not_there_any_more_is_reported_at_once(
    sleeper: subprocess.Popen[bytes], messages: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    one = beside(status_of(sleeper.pid, namespace("pid")), store)
    time.sleep(0.2)
    assert not messages
    sleeper.kill()
    sleeper.wait()
    until(lambda: messages)
    one.close()
    assert messages == [""]
    assert "rank 1 on here (last: training epoch 4) is gone" in capfd.readouterr().err
    assert json.loads(store.get("failure")) == ["heartbeat 0", 1]


@soon
@pytest.mark.parametrize("is_here", [True, False])
def test_a_silent_rank_is_reported_and_on_this_machine_killed(
    sleeper: subprocess.Popen[bytes], messages: list[str], capfd: pytest.CaptureFixture[str], is_here: bool
) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    one = beside(status_of(sleeper.pid, namespace("pid") if is_here else "another boot"))
    until(lambda: messages)
    one.close()
    assert messages == [""]
    assert "rank 1 on here (last: training epoch 4) has not answered for" in capfd.readouterr().err
    assert sleeper.wait(60) == -signal.SIGKILL if is_here else sleeper.poll() is None


@soon
def test_a_rank_that_never_sends_a_heartbeat_is_missed(messages: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    beat = Heartbeat(HashStore(), 0, 2, ADVISED)
    until(lambda: messages)
    beat.close()
    assert messages == [""] and "rank 1 (no heartbeat) has not answered for" in capfd.readouterr().err


@soon
def test_a_rank_that_leaves_the_job_as_its_process_ends_is_not_missed(messages: list[str]) -> None:
    """And the rank that reads it continues to publish: otherwise it would itself be missed."""
    sign = status_of(2**22 + 1, namespace("pid"))

    class Late(HashStore):
        def get(self, key: str) -> bytes:
            found = super().get(key)
            if key == "heartbeat/1":
                self.set(key, json.dumps(sign._replace(tick=-1)))
            return found

    store = Late()
    one = beside(sign, store)
    time.sleep(0.6)
    before = store.get("heartbeat/0")
    until(lambda: store.get("heartbeat/0") != before)
    one.close()
    assert not messages


def test_who_is_not_the_first_to_see_a_failure_prints_nothing(
    messages: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    FirstFailure("rank 1", 1).claim(store)
    one = beside(status_of(2**22 + 1, namespace("pid")), store)
    until(lambda: messages)
    one.close()
    assert messages == [""]
    assert capfd.readouterr().err == ""


def test_the_rank_that_serves_the_store_leaves_once_all_others_know_the_failure(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rank that reports it, 0 here, gets the time that this takes."""
    monkeypatch.setattr(liveness, "GRACE_S", 30.0)
    store = HashStore()
    zero, one = Heartbeat(store, 0, 2, ADVISED), Heartbeat(store, 1, 2, ADVISED)
    mine = FirstFailure("rank 0", 138)
    mine.claim(store)
    zero.close(serves_store=True)
    assert one.first == mine and zero.first is None and not messages
    one.close()


def test_all_ranks_name_those_that_are_silent_and_ask_the_store_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        ticks = [beat._tick for beat in beats]
        until(lambda: all(beat._tick > tick + 1 for beat, tick in zip(beats, ticks, strict=True)))  # all have published

    monkeypatch.setattr(liveness, "INTERVAL_S", 0.2)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    store, calls = HashStore(), Counter[str]()
    store.set("heartbeat/23", json.dumps(Status(7, 3, "node6", "training epoch 4", 1, "another boot")))
    beats = [Heartbeat(CountedStore(store), rank, 24, ADVISED) for rank in range(23)]
    for beat in beats:
        beat._store = CountedStore(store, calls)
    found = {lost_ranks_message(lost).partition(", or")[0] for lost in at_once([beat.silent_ranks for beat in beats])}
    at_once([beat.close for beat in beats])
    assert found == {"rank 23 on node6 (last: training epoch 4) is gone: killed"} and calls["multi_get"] == 2 * 23
