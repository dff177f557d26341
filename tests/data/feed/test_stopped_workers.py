"""Watchdog: stopped and hanging loader workers are killed, which ends their rank's wait."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tessera.data.feed import workers
from tessera.data.feed.workers import WorkerWatchdog

pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="only Linux says which processes are stopped")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_S", 0.02)
    monkeypatch.setenv("TESSERA_PEER_TIMEOUT", "0.1")
    monkeypatch.setenv("TESSERA_LOADER_TIMEOUT", "2")


def begun(stopped: WorkerWatchdog) -> Any:
    """A process that `stopped` watches, asleep for a minute."""
    with stopped.adding_started_workers():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
    return worker


@pytest.mark.usefixtures("fast")
def test_a_stopped_worker_is_killed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    stopped = WorkerWatchdog(3)
    first, second = begun(stopped), begun(stopped)
    os.kill(first.pid, signal.SIGSTOP)
    first.join(55)
    assert first.exitcode == -signal.SIGKILL and second.is_alive()
    said = capfd.readouterr().err
    assert said.startswith(f"rank 3: loader worker {first.name} (process {first.pid}) has been stopped for"), said
    stopped.close()
    second.join(55)
    assert second.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("fast")
def test_workers_that_give_no_batch_in_time_are_killed_and_the_limit_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopped = WorkerWatchdog(1)
    worker = begun(stopped)
    for _ in range(6):  # batches that come in time, though all together they take longer
        with stopped.waiting():
            time.sleep(0.5)
    assert worker.is_alive()
    with stopped.waiting():
        worker.join(55)
    assert worker.exitcode is not None
    said = capfd.readouterr().err
    assert re.match(r"rank 1: the loader workers returned no batch for \d+ s \(TESSERA_LOADER_TIMEOUT\)", said), said
    stopped.close()


def test_a_worker_that_is_stopped_at_the_end_is_not_waited_for() -> None:
    stopped = WorkerWatchdog(0)
    worker = begun(stopped)
    os.kill(worker.pid, signal.SIGSTOP)
    while not workers._is_stopped(worker.pid):
        time.sleep(0.01)
    stopped.close()
    worker.join(55)
    assert worker.exitcode == -signal.SIGKILL
