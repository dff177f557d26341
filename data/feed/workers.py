"""Loader workers: how many a rank may have, and what each does first."""

from __future__ import annotations

import gc
import logging
import os
import signal

import torch

from data.feed.shared_memory import SharedMemory
from utils.ranks.signals import SIGNALS
from utils.ranks.stack_dumps import print_stacks_on_signal
from utils.ranks.world import World

log = logging.getLogger(__name__)

PREFETCH = 2  # batches each worker prepares ahead


def cap_workers(asked: int, world: World) -> int:
    """Workers for this rank: as asked, but no more than its processors.

    At least 1 where any were asked for: even a single processor overlaps decoding with a GPU's work.
    """
    return min(asked, world.cpus)


def affordable_workers(workers: int, batch_bytes: int, world: World, memory: SharedMemory) -> int:
    """Workers whose batches fit into what is left of shared memory; that much is promised to them. All ranks call it.

    Args:
        workers: as many as the processors allow.
        batch_bytes: size of the largest batch of a rank.
        world: this rank.
        memory: the node's account.
    """
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
