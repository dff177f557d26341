"""Loader worker processes: how many, their initialisation, and their end."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from types import TracebackType

import torch

from tessera.data.feed.cache import ShmBudget
from tessera.data.source.decode import in_loader_worker
from tessera.utils.environment import loader_timeout_s
from tessera.utils.machine.host import open_files_left
from tessera.utils.ranks.failures import SIGNALS, print_nonblocking, print_stacks_on_sigusr2
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)

PREFETCH = 2  # batches that each worker prepares ahead
_SHARED_MEMORY_FLAGS = "docker run --shm-size=8g, or --ipc=host"
_FILES = 20  # that a rank opens for each worker: queues, and the tensors of its batches
_STACKS_S = 1.0  # that workers have to print their stacks


def reserve_workers(workers: int, batch_bytes: int, world: World, memory: ShmBudget) -> int:
    """Return the number of workers for this rank, and reserve shared memory for them. All ranks call this together.

    It is the requested number, limited by the rank's processors and shared memory; 0 in a process that may not start
    others, or if processes cannot share memory. `batch_bytes` is the size of the largest batch of a rank.
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
    open_files_left(workers * _FILES)  # raises the limit if it is too low
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


def _bind_socket() -> None:
    """Open a socket like that which a worker sends its batches through."""
    with tempfile.TemporaryDirectory(prefix="pymp-") as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(f"{folder}/listener-{'x' * 8}")  # the name pattern of multiprocessing


@cache
def _warn_of_pool() -> None:
    """Warn once in a process, for all its loaders."""
    log.warning(
        "This process is a worker of multiprocessing.Pool or Celery, which may not start processes: batches are loaded "
        "in the process itself (workers=0), which is slower."
    )


def init_worker(worker: int) -> None:
    """Initialise a worker process. Torch has already seeded its random generators from the loader's generator."""
    torch.set_num_threads(1)
    in_loader_worker.set()
    gc.freeze()  # otherwise the collector would copy the pages of the rank's objects
    # Ctrl-C, torchrun and SLURM signal the whole process group. Only the rank reacts, and ends its workers.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_sigusr2()
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


@contextmanager
def batch_timeout(workers: Sequence[BaseProcess], rank: int) -> Iterator[None]:
    """Kill the workers if this context takes longer than TESSERA_LOADER_TIMEOUT; a killed worker ends the run.

    Torch's own timeout does not cover a worker that is stopped (SIGSTOP) while it sends a batch.
    """
    timer = threading.Timer(loader_timeout_s(), _kill_hanging, (workers, rank))
    timer.daemon = True
    if workers:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_hanging(workers: Sequence[BaseProcess], rank: int) -> None:
    """Let each worker print its stack, and kill it."""
    print_nonblocking(
        f"rank {rank}: the loader workers returned no batch for {loader_timeout_s():g} s (TESSERA_LOADER_TIMEOUT). "
        "Printing their stacks and killing them. Check that the dataset's storage responds."
    )
    for worker in workers:
        with suppress(OSError):  # it has ended already
            os.kill(worker.pid or 0, signal.SIGUSR2)
    time.sleep(_STACKS_S)
    kill_workers(workers)


def kill_workers(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers that are alive: they ignore the signal by which multiprocessing ends them."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(_STACKS_S)
