"""A loader worker that is stopped is killed after a while, and so ends its rank's wait for it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.data.feed import workers
from tessera.data.feed.workers import StoppedWorkers
from tessera.utils.ranks import failures

pytestmark = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="only Linux says which processes are stopped")


def test_a_stopped_worker_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.02)
    context = multiprocessing.get_context("fork")
    stopped = StoppedWorkers(3, 0.1)
    with stopped.watch_new():
        first, second = (context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2))
        first.start()
        second.start()
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    first.join(55)
    assert first.exitcode == -signal.SIGKILL and second.is_alive()
    said = capfd.readouterr().err
    assert said.startswith(f"rank 3: loader worker {first.name} (process {first.pid}) has been stopped for"), said
    second.kill()
    second.join(55)
    stopped.close()


def test_a_stopped_worker_is_killed_where_nobody_reads_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.02)
    monkeypatch.setattr(failures, "_PRINTING_S", 0.1)
    read = threading.Event()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: read.wait(60), flush=lambda: None))
    stopped = StoppedWorkers(0, 0.1)
    with stopped.watch_new():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    worker.join(55)
    ended = worker.exitcode
    read.set()
    stopped.close()
    assert ended == -signal.SIGKILL


def test_workers_that_give_no_batch_in_time_are_killed_and_the_limit_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "LOOK_S", 0.02)
    stopped = StoppedWorkers(1, 60, 2.0)
    with stopped.watch_new():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
    for _ in range(6):  # batches that come in time, though all together they take longer
        with stopped.waiting():
            time.sleep(0.5)
    assert worker.is_alive()
    with stopped.waiting():
        worker.join(55)
    assert worker.exitcode is not None
    said = capfd.readouterr().err
    assert re.match(r"rank 1: its loader workers have given no batch for \d+ s \(TESSERA_LOADER_TIMEOUT\)", said), said
    stopped.close()


def test_a_worker_that_is_stopped_at_the_end_is_not_waited_for() -> None:
    stopped = StoppedWorkers(0, 60)
    with stopped.watch_new():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    while not workers._is_stopped(worker.pid):
        time.sleep(0.01)
    stopped.close()
    worker.join(55)
    assert worker.exitcode == -signal.SIGKILL
