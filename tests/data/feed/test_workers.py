"""Loader workers: threads, random generators, ends, and their number."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tessera.data.feed.cache import ShmBudget
from tessera.data.feed.loader import Loader
from tessera.data.feed.workers import reserve_workers
from tessera.utils.errors import Interrupted
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.types import Batch, Draw
from tests.data.feed.made_rank import rank

ROOT = Path(__file__).resolve().parents[3]


class Drawing:
    """A dataset whose batches are what the process-level generators give, and the threads in use."""

    def __len__(self) -> int:
        return 2

    def __getitems__(self, draws: Sequence[Draw]) -> tuple[int, float, float, int, int]:
        threads = cv2.getNumThreads(), torch.get_num_threads()
        return (torch.initial_seed(), float(np.random.random()), random.random(), *threads)  # noqa: NPY002


def started(dataset: Any, workers: int = 1, number: int = 0, size: int = 1) -> Loader[Any]:
    """A loader of two batches whose workers have begun."""
    sampler: Any = [[0], [1]]
    loader: Loader[Any] = Loader(dataset, sampler, rank(number, size), workers=workers, seed=7)
    loader._start()
    return loader


def test_workers_have_one_thread_and_generators_of_their_own() -> None:
    def drawn(number: int) -> list[Any]:
        with started(Drawing(), 2, number, 2) as loader:
            return [next(loader._stream), next(loader._stream)]

    twice = [drawn(0), drawn(0)]
    assert twice[0] == twice[1]
    everything = twice[0] + drawn(1)
    for source in zip(*everything, strict=True):
        if source != (1, 1, 1, 1):
            assert len(set(source)) == 4, source
    assert all(item[3:] == (1, 1) for item in everything)


class Late:
    """An iterator that is asked to stop while it goes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        del self.stream


def test_a_signal_while_the_workers_are_ended_comes_afterwards() -> None:
    """Raised within torch's `__del__` it was lost, and so were the workers, for which the rank waited at its end."""
    with pytest.raises(Interrupted), StopSignals():
        loader = started(Drawing())
        loader._stream = Late(loader._stream)  # type: ignore[assignment]
        workers_before = multiprocessing.active_children()
        loader.close()
    assert workers_before and not any(worker.is_alive() for worker in workers_before)


def test_workers_that_torch_does_not_end_are_killed() -> None:
    """As where a traceback still holds its iterator."""
    with started(Drawing()) as loader:
        held = loader._stream
        workers_before = multiprocessing.active_children()
    assert workers_before and not any(worker.is_alive() for worker in workers_before)
    del held


ORPHAN = """
import multiprocessing, os, signal, sys, time
from tessera.data.feed.workers import init_worker

def work(late):
    time.sleep(late)
    init_worker(0)
    time.sleep(60)

workers = [multiprocessing.get_context("fork").Process(target=work, args=(late,)) for late in (0.0, 1.0)]
for worker in workers:
    worker.start()
print(*(worker.pid for worker in workers), flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_its_rank_also_where_it_has_not_begun() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):
        end = time.monotonic() + 50
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}").exists()


class Unsendable(Drawing):
    """A dataset of which no batch can be sent to another process."""

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        return threading.Lock()


def test_a_batch_that_cannot_be_sent_ends_its_worker_and_is_no_wait_without_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        started(Unsendable()) as loader,
        pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"),
    ):
        next(loader._stream)
    assert "a batch cannot be sent (TypeError: cannot pickle" in capfd.readouterr().err


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_while_the_loader_is_closed_is_no_error() -> None:
    with started(Drawing()) as loader:
        next(loader._stream)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)  # it is waited for
        killer = threading.Timer(0.3, worker.kill)
        killer.start()
    killer.join()
    gc.collect()
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
@pytest.mark.parametrize(("batches", "workers"), [(100, 8), (18, 8), (17, 7), (3, 0), (0, 0)])
def test_workers_are_capped_by_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batches: int, workers: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=batches * 1000 * 2))
    memory = ShmBudget(rank(0, 2))
    with caplog.at_level(logging.WARNING):
        assert reserve_workers(8, 1000, rank(0, 2), memory) == workers
    assert ("--shm-size" in caplog.text) == (workers < 8)


def long_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (long := folder / ("long " * 20)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))


def read_only(*_: object) -> None:
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(
    ("limit", "warning"),
    [
        (long_folder, "AF_UNIX path too long: without sockets there are no loader workers"),
        (
            lambda patch, _: patch.setattr(multiprocessing, "Lock", read_only),
            "/dev/shm: Read-only file system: without locks there are no loader workers",
        ),
        (
            lambda patch, _: patch.setitem(multiprocessing.current_process()._config, "daemon", True),
            "may not start processes: batches are loaded in the process itself (workers=0)",
        ),
    ],
    ids=["sockets", "locks", "a worker of multiprocessing.Pool"],
)
def test_without_workers_a_rank_loads_its_own_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: Any, warning: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    limit(monkeypatch, tmp_path)
    world = rank(0, 2)
    assert reserve_workers(8, 1000, world, ShmBudget(world)) == 0
    assert caplog.text.count(warning) == 1 and not list(tmp_path.rglob("pymp*"))


class Hanging(Drawing):
    """A dataset whose second batch does not come; the first one takes its time."""

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        time.sleep(60 if draws[0] else 0.7)
        return Batch(*[torch.zeros(0)] * 5)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_workers_that_give_no_batch_in_time_are_killed_and_the_limit_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_stopped: bool
) -> None:
    monkeypatch.setenv("TESSERA_LOADER_TIMEOUT", "1")
    with started(Hanging()) as loader:
        loader._take()
        (worker,) = loader._workers
        if is_stopped:
            os.kill(worker.pid or 0, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="worker"):
            loader._take()
        assert worker.exitcode == -signal.SIGKILL
    said = capfd.readouterr().err
    assert "rank 0: the loader workers returned no batch for 1 s (TESSERA_LOADER_TIMEOUT)" in said
    assert is_stopped or "__getitems__" in said, "its stack"
