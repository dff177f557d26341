"""Worker processes: their threads, their generators, and how many fit into shared memory."""

from __future__ import annotations

import logging
import multiprocessing
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from data.feed import workers
from data.feed.loader import Loader
from data.feed.shared_memory import SharedMemory
from data.feed.workers import affordable_workers
from tests.data.feed.made_rank import rank
from utils.types import Draw


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
