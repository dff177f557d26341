"""Loader workers: how many a rank may have, and what each does first."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from data.feed.shared_memory import SharedMemory
from utils.environment import peer_timeout_s
from utils.machine.limits import open_files_left
from utils.ranks.signals import SIGNALS
from utils.ranks.stack_dumps import print_stacks_on_signal
from utils.ranks.watchdog import say
from utils.ranks.world import World

log = logging.getLogger(__name__)

PREFETCH = 2  # batches each worker prepares ahead
LOOK_S = 1.0
_FILES = 20  # that a rank opens for a worker: its queues, and the tensors of its batches


def cap_workers(asked: int, world: World) -> int:
    """Workers for this rank: as asked, but no more than its processors.

    At least 1 where any were asked for: even a single processor overlaps decoding with a GPU's work.
    """
    return min(asked, world.cpus)


def affordable_workers(workers: int, batch_bytes: int, world: World, memory: SharedMemory) -> int:
    """Workers whose batches fit into what is left of shared memory; that much is promised to them. All ranks call it.

    None where processes cannot share memory at all, and no more than this process may open files for.

    Args:
        workers: as many as the processors allow.
        batch_bytes: size of the largest batch of a rank.
        world: this rank.
        memory: the node's account.
    """
    refusal = memory.refusal if workers else ""
    if refusal:
        log.warning(
            f"{memory.folder}: {refusal}: without it there are no loader workers, and each rank loads its own batches, "
            f"which is slow. Mount a file system in memory there (docker run --shm-size=8g, or --ipc=host)."
        )
    openable = max(open_files_left(workers * _FILES) // _FILES, 0)
    if not refusal and openable < workers:
        log.warning(
            f"This process may open files for {openable} loader workers, not {workers}: using {openable}. Raise the "
            f"limit of open files (ulimit -n 4096)."
        )
    workers = 0 if refusal else min(workers, openable)
    # Each worker holds a finished batch for every one it prepares ahead; the rank holds up to two more.
    room = memory.room_of_a_rank // max(batch_bytes, 1)
    affordable = min(workers, max((room - 2) // PREFETCH, 0)) if memory.exists else workers
    if affordable < workers and world.is_main:
        log.warning(
            f"{memory.folder} has room for the batches of {affordable} loader workers a rank, not {workers}: using "
            f"{affordable}. Give the container more (docker run --shm-size=8g, or --ipc=host)."
        )
    memory.promise_ranks((PREFETCH * affordable + 2) * batch_bytes if affordable and memory.exists else 0)
    return affordable


def begin_worker(worker: int) -> None:
    """Start of a worker process. Its random generators are already seeded by torch, from the loader's generator."""
    torch.set_num_threads(1)
    gc.freeze()  # objects of the rank stay alive: a collector that visited them would copy their pages
    # Ctrl-C, torchrun and SLURM signal the whole process group; the rank alone reacts, and ends its workers.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_signal(f"loader worker {worker} of process {os.getppid()}")


class StoppedWorkers:
    """Kills loader workers of this process that are stopped (SIGSTOP) for long; a killed one ends the run.

    One that is stopped is alive for its rank, which would wait for it without end; and so would the workers of other
    ranks for what it has locked. Only Linux says which processes are stopped.

    Args:
        rank: of this process, for the message.
        timeout_s: how long one may be stopped.
    """

    def __init__(self, rank: int, timeout_s: float | None = None) -> None:
        self._rank, self._timeout_s = rank, peer_timeout_s() if timeout_s is None else timeout_s
        self._workers: list[BaseProcess] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch_new(self) -> Iterator[None]:
        """Watch the workers that are started inside."""
        before = multiprocessing.active_children()
        yield
        self._workers += [worker for worker in multiprocessing.active_children() if worker not in before]
        if self._thread is None and self._workers:
            self._thread = threading.Thread(target=self._look, name="stopped workers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no longer, and kill the workers that are stopped now: their rank would wait for them at its end."""
        self._closed.set()
        for worker in self._workers:
            if _is_stopped(worker.pid):
                worker.kill()

    def _look(self) -> None:
        stopped_s: dict[int | None, float] = {}
        while not self._closed.wait(LOOK_S):
            pids = [worker.pid for worker in self._workers if _is_stopped(worker.pid)]
            stopped_s = {pid: stopped_s.get(pid, 0.0) + LOOK_S for pid in pids}
            for worker in self._workers:
                if stopped_s.get(worker.pid, 0.0) > self._timeout_s:
                    say(
                        f"rank {self._rank}: loader worker {worker.name} (process {worker.pid}) has been stopped for "
                        f"{stopped_s.pop(worker.pid):.0f} s: it is killed."
                    )
                    worker.kill()


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or this is not Linux
        return False
