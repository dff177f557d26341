"""Loader worker processes: how many, their initialisation, and a watchdog that kills stopped or hanging ones."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from types import TracebackType

import torch

from tessera.data.feed.cache import ShmBudget
from tessera.utils.environment import loader_timeout_s, peer_timeout_s
from tessera.utils.machine.resource_limits import open_files_left
from tessera.utils.ranks.failures import print_nonblocking
from tessera.utils.ranks.signals import SIGNALS, start_signal_thread
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)

PREFETCH = 2  # batches that each worker prepares ahead
CHECK_S = 1.0  # between two checks of the workers
_SHARED_MEMORY_FLAGS = "docker run --shm-size=8g, or --ipc=host"
_FILES = 20  # that a rank opens for each worker: queues, and the tensors of its batches


def reserve_workers(workers: int, batch_bytes: int, world: World, memory: ShmBudget) -> int:
    """Return the number of workers for this rank, and reserve shared memory for them. All ranks call this together.

    It is the requested number, limited by the rank's processors, open files and shared memory; 0 if processes cannot
    share memory at all. `batch_bytes` is the size of the largest batch of a rank.
    """
    workers = min(workers, world.cpus)
    if workers and multiprocessing.current_process().daemon:
        _warn_of_pool()
        workers = 0
    for needed, path, attempt, remedy in (
        ("sockets", tempfile.gettempdir(), _bind_socket, "Set TMPDIR to a writable folder with a short path"),
        ("locks", memory.folder, multiprocessing.Lock, f"Mount a file system in memory there ({_SHARED_MEMORY_FLAGS})"),
    ):
        if workers and (failure := _error_of(attempt)):
            log.warning(
                f"{path}: {failure}: without {needed} there are no loader workers, and each rank loads its own "
                f"batches, which is slow. {remedy}."
            )
            workers = 0
    openable = max(open_files_left(workers * _FILES) // _FILES, 0)
    if openable < workers:
        log.warning(
            f"The limit on open files allows {openable} loader workers, not {workers}: using {openable}. Raise it "
            f"(ulimit -n 4096)."
        )
        workers = openable
    # Each worker holds its prefetched batches; the rank holds up to two more.
    batches = memory.available_per_rank // max(batch_bytes, 1)
    affordable = min(workers, max((batches - 2) // PREFETCH, 0)) if memory.exists else workers
    if affordable < workers and world.is_main:
        log.warning(
            f"{memory.folder} has space for the batches of {affordable} loader workers per rank, not {workers}: using "
            f"{affordable}. Give the container more ({_SHARED_MEMORY_FLAGS})."
        )
    memory.reserve_for_ranks((PREFETCH * affordable + 2) * batch_bytes if affordable and memory.exists else 0)
    return affordable


def _error_of(attempt: Callable[[], object]) -> str:
    """Return the system's error for an attempt, such as "Read-only file system"; "" if it succeeds."""
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@cache
def _warn_of_pool() -> None:
    """Warn once in a process, for all its loaders."""
    log.warning(
        "This process is a worker of multiprocessing.Pool or Celery, which may not start processes: batches are loaded "
        "in the process itself (workers=0), which is slower."
    )


def _bind_socket() -> None:
    """Open a socket like that which a worker sends its batches through."""
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(f"{folder}/listener-{'x' * 8}")  # the name pattern of multiprocessing


def init_worker(worker: int) -> None:
    """Initialise a worker process. Torch has already seeded its random generators from the loader's generator."""
    torch.set_num_threads(1)
    gc.freeze()  # otherwise the collector would copy the pages of the rank's objects
    # Ctrl-C, torchrun and SLURM signal the whole process group. Only the rank reacts, and ends its workers.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    start_signal_thread(f"loader worker {worker} of process {os.getppid()}")
    threading.Thread(target=_exit_with_rank, name="end with the rank", daemon=True).start()
    sys.excepthook = print_unless_disconnected
    Queue._on_queue_feeder_error = staticmethod(_exit_if_unsendable)  # type: ignore[attr-defined]


def _exit_with_rank() -> None:
    """Exit when the rank exits. Torch's own check fails if the rank was killed before the check started."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def _exit_if_unsendable(error: Exception, batch: object) -> None:
    """Exit if a batch could not be sent: multiprocessing would drop it, and the rank would wait for it forever."""
    print_nonblocking(
        f"loader worker of process {os.getppid()}: a batch cannot be sent ({type(error).__name__}: {error})"
    )
    os._exit(1)


def print_unless_disconnected(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an uncaught exception of a thread, unless the rank is gone."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


@contextmanager
def ignore_killed_workers() -> Iterator[None]:
    """Prevent torch from raising for a killed worker, whose batches are no longer needed."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


class WorkerWatchdog:
    """Watchdog that kills loader workers which are stopped (SIGSTOP) or hang; a killed worker ends the run.

    A stopped or hanging worker is alive for its rank, which would wait for it forever. Workers of other ranks would
    wait for its locks. Only Linux reports which processes are stopped.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._timeout_s = rank, peer_timeout_s()
        self._batch_timeout_s = loader_timeout_s()
        self._waits = 0  # odd while the rank waits for a batch
        self._workers: list[BaseProcess] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def adding_started_workers(self) -> Iterator[None]:
        """Also watch the workers that are started in this context."""
        before = multiprocessing.active_children()
        yield
        self._workers += [worker for worker in multiprocessing.active_children() if worker not in before]
        if self._thread is None and self._workers:
            self._thread = threading.Thread(target=self._watch, name="stopped workers", daemon=True)
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this context as waiting for a batch."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits += 1

    def close(self) -> None:
        """Stop watching, and kill the remaining workers: they ignore the signal by which multiprocessing ends them."""
        self._closed.set()
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join(CHECK_S)

    def _watch(self) -> None:
        stopped_s: dict[int | None, float] = {}
        wait, waited_s = 0, 0.0
        while not self._closed.wait(CHECK_S):
            waited_s = waited_s + CHECK_S if self._waits == wait and wait % 2 else 0.0
            wait = self._waits
            if waited_s > self._batch_timeout_s:
                self._kill_all(waited_s)
                return
            pids = [worker.pid for worker in self._workers if _is_stopped(worker.pid)]
            stopped_s = {pid: stopped_s.get(pid, 0.0) + CHECK_S for pid in pids}
            for worker in self._workers:
                if stopped_s.get(worker.pid, 0.0) > self._timeout_s:
                    print_nonblocking(
                        f"rank {self._rank}: loader worker {worker.name} (process {worker.pid}) has been stopped for "
                        f"{stopped_s.pop(worker.pid):.0f} s. Killing it."
                    )
                    worker.kill()

    def _kill_all(self, waited_s: float) -> None:
        """Let each worker print its stack, and kill it."""
        print_nonblocking(
            f"rank {self._rank}: the loader workers returned no batch for {waited_s:.0f} s (TESSERA_LOADER_TIMEOUT). "
            "Printing their stacks and killing them. Check that the dataset's storage responds."
        )
        alive = [(worker, worker.pid) for worker in self._workers if worker.is_alive()]
        for _, pid in alive:
            with suppress(OSError):  # it has ended already
                os.kill(pid or 0, signal.SIGUSR2)
        time.sleep(CHECK_S)
        for worker, _ in alive:
            worker.kill()


def _is_stopped(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or this is not Linux
        return False
