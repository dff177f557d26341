"""Worker processes: their threads, their generators, and how many fit into shared memory."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tessera.data.feed import workers
from tessera.data.feed.loader import Loader
from tessera.data.feed.shared_memory import SharedMemory
from tessera.data.feed.workers import affordable_workers, print_unless_disconnected
from tessera.utils.types import Draw
from tests.data.feed.made_rank import rank


class Drawing:
    """A dataset whose batches are what the process-level generators give, and the threads in use."""

    def __len__(self) -> int:
        return 2

    def __getitems__(self, draws: Sequence[Draw]) -> tuple[int, float, float, int, int]:
        threads = cv2.getNumThreads(), torch.get_num_threads()
        return (torch.initial_seed(), float(np.random.random()), random.random(), *threads)  # noqa: NPY002


def test_workers_have_one_thread_and_generators_of_their_own() -> None:
    def drawn(number: int) -> list[Any]:
        sampler: Any = [[0], [1]]
        dataset: Any = Drawing()
        loader = Loader(dataset, sampler, rank(number, 2), workers=2, seed=7)
        with loader:
            loader._start()
            return [next(loader._stream), next(loader._stream)]

    twice = [drawn(0), drawn(0)]
    assert twice[0] == twice[1]
    everything = twice[0] + drawn(1)
    for source in zip(*everything, strict=True):
        if source != (1, 1, 1, 1):
            assert len(set(source)) == 4, source
    assert all(item[3:] == (1, 1) for item in everything)


def test_a_worker_is_silent_about_a_lost_rank_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Its thread that hands batches over meets the end of a killed rank as an error."""
    for error in (ConnectionResetError(104, "Connection reset by peer"), ZeroDivisionError("a defect")):
        print_unless_disconnected(type(error), error, None)
    assert capfd.readouterr().err == "ZeroDivisionError: a defect\n"


class Unsendable(Drawing):
    """A dataset of which no batch can be sent to another process."""

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        return threading.Lock()


def test_a_batch_that_cannot_be_sent_ends_its_worker_and_is_no_wait_without_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sampler: Any = [[0], [1]]
    dataset: Any = Unsendable()
    with Loader(dataset, sampler, rank(0, 1), workers=1, seed=7) as loader:
        loader._start()
        with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
            next(loader._stream)
    assert "a batch cannot be sent (TypeError: cannot pickle" in capfd.readouterr().err


def test_no_workers_where_a_socket_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = tmp_path / ("long " * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    world = rank(0, 1)
    assert affordable_workers(4, 1, world, SharedMemory(world)) == 0
    assert "AF_UNIX path too long: without sockets there are no loader workers" in caplog.text and not list(
        long.iterdir()
    )


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_while_the_loader_is_closed_is_no_error() -> None:
    sampler: Any = [[0], [1]]
    dataset: Any = Drawing()
    loader = Loader(dataset, sampler, rank(0, 1), workers=1, seed=7)
    with loader:
        loader._start()
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
    memory = SharedMemory(rank(0, 2))
    with caplog.at_level(logging.WARNING):
        assert affordable_workers(8, 1000, rank(0, 2), memory) == workers
    assert ("--shm-size" in caplog.text) == (workers < 8)


def test_no_workers_where_processes_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a /dev/shm that is missing or read-only: not even a lock can be made."""

    def refused() -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing, "Lock", refused)
    assert affordable_workers(8, 1000, rank(0, 2), SharedMemory(rank(0, 2))) == 0
    assert "/dev/shm: Read-only file system: without it there are no loader workers" in caplog.text


def test_workers_are_capped_by_open_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(workers, "open_files_left", lambda _: 65)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    assert affordable_workers(8, 1000, rank(0, 2), SharedMemory(rank(0, 2))) == 3
    assert "open files for 3 loader workers, not 8" in caplog.text
