"""Loader workers: how many a rank may have, and what each does first."""

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

from tessera.data.feed.shared_memory import SharedMemory
from tessera.utils.environment import loader_timeout_s, peer_timeout_s
from tessera.utils.machine.resource_limits import open_files_left
from tessera.utils.ranks.failures import print_without_waiting
from tessera.utils.ranks.signals import SIGNALS, start_signal_thread
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)

PREFETCH = 2  # batches each worker prepares ahead
CHECK_S = 1.0  # between two looks at the workers
_SHARED_MEMORY_FLAGS = "docker run --shm-size=8g, or --ipc=host"
_FILES = 20  # that a rank opens for a worker: its queues, and the tensors of its batches


def cap_workers(asked: int, world: World) -> int:
    """Workers for this rank: as asked, but no more than its processors."""
    return min(asked, world.cpus)


def affordable_workers(workers: int, batch_bytes: int, world: World, memory: SharedMemory) -> int:
    """Workers whose batches fit into what is left of shared memory; that much is promised to them. All ranks call it.

    None where processes cannot share memory at all, and no more than this process may open files for. `batch_bytes` is
    the size of the largest batch of a rank.
    """
    if workers and multiprocessing.current_process().daemon:
        _warn_of_pool()
        workers = 0
    for needed, place, attempt, remedy in (
        ("sockets", tempfile.gettempdir(), _bind_socket, "Set TMPDIR to a writable folder with a short path"),
        ("locks", memory.folder, multiprocessing.Lock, f"Mount a file system in memory there ({_SHARED_MEMORY_FLAGS})"),
    ):
        if workers and (refusal := _refusal_of(attempt)):
            log.warning(
                f"{place}: {refusal}: without {needed} there are no loader workers, and each rank loads its own "
                f"batches, which is slow. {remedy}."
            )
            workers = 0
    openable = max(open_files_left(workers * _FILES) // _FILES, 0)
    if openable < workers:
        log.warning(
            f"This process may open files for {openable} loader workers, not {workers}: using {openable}. Raise the "
            f"limit of open files (ulimit -n 4096)."
        )
        workers = openable
    # Each worker holds a finished batch for every one it prepares ahead; the rank holds up to two more.
    room = memory.room_of_a_rank // max(batch_bytes, 1)
    affordable = min(workers, max((room - 2) // PREFETCH, 0)) if memory.exists else workers
    if affordable < workers and world.is_main:
        log.warning(
            f"{memory.folder} has room for the batches of {affordable} loader workers a rank, not {workers}: using "
            f"{affordable}. Give the container more ({_SHARED_MEMORY_FLAGS})."
        )
    memory.promise_ranks((PREFETCH * affordable + 2) * batch_bytes if affordable and memory.exists else 0)
    return affordable


def _refusal_of(attempt: Callable[[], object]) -> str:
    """What this system says against an attempt, such as "Read-only file system"; "" where it is allowed."""
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@cache
def _warn_of_pool() -> None:
    """Once in a process, for all its loaders."""
    log.warning(
        "This process is a worker of multiprocessing.Pool or Celery, which may not start processes: batches are loaded "
        "in the process itself (workers=0), which is slower."
    )


def _bind_socket() -> None:
    """Open a socket like that by which a worker hands its batches over."""
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(f"{folder}/listener-{'x' * 8}")  # as multiprocessing names them


def begin_worker(worker: int) -> None:
    """Start of a worker process. Its random generators are already seeded by torch, from the loader's generator."""
    torch.set_num_threads(1)
    gc.freeze()  # objects of the rank stay alive: a collector that visited them would copy their pages
    # Ctrl-C, torchrun and SLURM signal the whole process group; the rank alone reacts, and ends its workers.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    start_signal_thread(f"loader worker {worker} of process {os.getppid()}")
    threading.Thread(target=_end_with_the_rank, name="end with the rank", daemon=True).start()
    sys.excepthook = print_unless_disconnected
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


def _end_with_the_rank() -> None:
    """Torch's own watch takes whoever is the parent when it begins for the rank, which may have been killed by then."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def _end_worker(error: Exception, batch: object) -> None:
    """A batch could not be sent: multiprocessing would drop it, and the rank wait for it without end."""
    print_without_waiting(
        f"loader worker of process {os.getppid()}: a batch cannot be sent ({type(error).__name__}: {error})"
    )
    os._exit(1)


def print_unless_disconnected(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print what ended a thread, but for a rank that is gone: multiprocessing's thread that hands batches to it."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


@contextmanager
def ignoring_lost_workers() -> Iterator[None]:
    """Inside, torch does not raise where a worker was killed: nobody waits for its batches any more."""
    if threading.current_thread() is not threading.main_thread():  # others may handle no signals
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


class StoppedWorkers:
    """Kills loader workers of this process that are stopped (SIGSTOP) or hang for long; a killed one ends the run.

    One that is stopped or hangs is alive for its rank, which would wait for it without end; and so would the workers of
    other ranks for what it has locked. Only Linux says which processes are stopped.
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
        """Watch also the workers that are started inside."""
        before = multiprocessing.active_children()
        yield
        self._workers += [worker for worker in multiprocessing.active_children() if worker not in before]
        if self._thread is None and self._workers:
            self._thread = threading.Thread(target=self._watch, name="stopped workers", daemon=True)
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the rank waits for a batch of its workers."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits += 1

    def close(self) -> None:
        """Watch no longer, and kill the workers that have not ended: they ignore what multiprocessing, which waits for
        them at the end of their rank, sends to end them.
        """
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
                    print_without_waiting(
                        f"rank {self._rank}: loader worker {worker.name} (process {worker.pid}) has been stopped for "
                        f"{stopped_s.pop(worker.pid):.0f} s: it is killed."
                    )
                    worker.kill()

    def _kill_all(self, waited_s: float) -> None:
        """The rank has waited too long for a batch: each worker prints where it is, and is killed."""
        print_without_waiting(
            f"rank {self._rank}: its loader workers have given no batch for {waited_s:.0f} s (TESSERA_LOADER_TIMEOUT): "
            "they print their stacks and are killed. Does their storage answer?"
        )
        alive = [(worker, worker.pid) for worker in self._workers if worker.is_alive()]
        for _, pid in alive:
            with suppress(OSError):  # it has ended by itself
                os.kill(pid or 0, signal.SIGUSR2)
        time.sleep(CHECK_S)
        for worker, _ in alive:
            worker.kill()


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or this is not Linux
        return False
