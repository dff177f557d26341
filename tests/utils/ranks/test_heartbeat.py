"""Signs of life: what a rank makes of another one's silence, without any job around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from tessera.utils.ranks import heartbeat
from tessera.utils.ranks.failures import FirstFailure
from tessera.utils.ranks.heartbeat import Heartbeat, Sign, is_gone
from tests.at_once import at_once
from tests.utils.ranks.counted_store import CountedStore


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def watch(store: HashStore, sign: Sign, timeout_s: float) -> tuple[Heartbeat, list[str]]:
    """Rank 0 of two, the other of which has given `sign` and no more."""
    store.set("heartbeat/1", sign.encode())
    said: list[str] = []
    return Heartbeat(store, 0, 2, "here", timeout_s, lambda message, code: said.append(message)), said


def until(said: list[str]) -> None:
    end = time.monotonic() + 60
    while not said and time.monotonic() < end:
        time.sleep(0.01)


def sign_of(number: int, kernel: str, tick: int = 7) -> Sign:
    return Sign(tick, 3, "here", "training epoch 4", f"{number} {kernel}")


def test_a_sign_survives_the_wire() -> None:
    sign = sign_of(12, "boot/pid:[1]")
    assert Sign.decode(sign.encode().encode()) == sign
    assert Sign.decode(Sign(1, 2, "h", "a|b", "3 ").encode().encode()).activity == "a|b"


def test_a_rank_that_is_not_there_any_more_is_reported_at_once(
    sleeper: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    one, said = watch(store, sign_of(sleeper.pid, heartbeat._kernel()), timeout_s=60)
    time.sleep(0.2)
    assert not said
    sleeper.kill()
    sleeper.wait()
    until(said)
    one.close()
    assert said == [""]
    assert "rank 1 on here (last: training epoch 4) is gone" in capfd.readouterr().err
    assert FirstFailure.read(store) == FirstFailure("heartbeat 0", 1)


def test_a_silent_rank_of_this_machine_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    one, said = watch(HashStore(), sign_of(sleeper.pid, heartbeat._kernel()), timeout_s=0.2)
    until(said)
    one.close()
    assert said[0].startswith("rank 1 on here has not answered for")
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_silent_rank_of_another_machine_is_only_reported(sleeper: subprocess.Popen[bytes]) -> None:
    one, said = watch(HashStore(), sign_of(sleeper.pid, "another boot"), timeout_s=0.2)
    until(said)
    one.close()
    assert "has not answered" in said[0]
    assert sleeper.poll() is None


def test_a_rank_that_said_goodbye_is_not_missed(sleeper: subprocess.Popen[bytes]) -> None:
    one, said = watch(HashStore(), sign_of(2**22 + 1, heartbeat._kernel(), tick=-1), timeout_s=0.1)
    time.sleep(0.5)
    one.close()
    assert not said


def test_who_is_not_the_first_to_see_a_failure_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    FirstFailure("rank 1", 1).claim(store)
    one, said = watch(store, sign_of(2**22 + 1, heartbeat._kernel()), timeout_s=60)
    until(said)
    one.close()
    assert said == [""]
    assert capfd.readouterr().err == ""


def all_ask(asked: Counter[str], size: int, already: int = 0) -> list[list[str]]:
    """Whom each of `size` - 1 ranks finds silent when all ask at once; the last one was killed before."""
    store = HashStore()
    store.set("heartbeat/" + str(size - 1), Sign(7, 3, "node6", "training epoch 4", "1 another boot").encode())
    store.add("silent/asked/0", already)
    beats = [Heartbeat(CountedStore(store), rank, size, "node7", 60, lambda *_: None) for rank in range(size - 1)]
    for beat in beats:
        beat._store = CountedStore(store, asked)
    found = at_once([beat.silent for beat in beats])
    at_once([beat.close for beat in beats])
    return [[is_gone([lost]) for lost in each] for each in found]


def test_one_rank_looks_for_those_that_are_silent_and_all_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.2)
    asked: Counter[str] = Counter()
    found = all_ask(asked, 24)
    assert found == [["rank 23 on node6 (last: training epoch 4) is gone: killed, or its host is. See the launcher's "
                      "lines, and dmesg on that host."]] * 23  # fmt: skip
    assert asked["multi_get"] == 2 and asked.total() < 24 * 30, asked


def test_where_the_rank_that_looks_is_lost_too_the_others_look_themselves() -> None:
    assert [len(found) for found in all_ask(Counter(), 4, already=1)] == [1] * 3


def test_a_rank_that_falls_silent_later_is_found_though_nobody_was_before() -> None:
    store = HashStore()
    asking, other = (Heartbeat(store, rank, 2, "node7", 60, lambda *_: None) for rank in range(2))
    found = asking.silent()
    other._closed.set()
    other._thread.join()  # no more signs, and no goodbye
    assert (found, [rank for rank, _ in asking.silent()]) == ([], [1])
    asking.close()


def test_a_rank_that_ended_regularly_is_not_missed() -> None:
    store, said = HashStore(), []
    ended = Heartbeat(store, 1, 2, "node7", 60)
    ended.close()
    heartbeat = Heartbeat(store, 0, 2, "node6", 0.2, lambda message, code: said.append(message))
    time.sleep(1)
    heartbeat.close()
    assert said == []
