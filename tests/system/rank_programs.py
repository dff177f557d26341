"""Programs for the ranks of a test job: `rank_programs.py NAME[=ARGUMENT] …` runs functions of this file in order.

Each rank prints each result as a line of JSON. DEVICE, by default cpu, is `--device`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from contextlib import suppress
from unittest import mock

import torch
from torch import nn

from tessera.utils.engine.step import RunningStatistics
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.ddp import average_statistics, smart_DDP
from tessera.utils.ranks.failures import run_rank
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World

Found = dict[str, object]


def messages(world: World) -> Found:
    total = world.sum(torch.tensor([world.rank + 1.0], device=world.device))
    later = world.begin_sum(torch.tensor([10.0 * world.rank], device=world.device))
    return {
        "broadcast": world.broadcast({"from": world.rank}),
        "gathered": world.all_gather(world.rank * 2),
        "on_main": world.gather("x" * world.rank),
        "first": world.node_first(f"rank {world.rank}"),
        "main": world.run_on_main(lambda: world.rank + 100),
        "sum": total.item(),
        "later": later().item(),
        "local": [world.local_rank, world.local_size, world.node],
        "threads": [torch.get_num_threads(), world.cpus],
    }


def foreign_threads(world: World) -> Found:
    """How often threads that are not Python's entered the interpreter in some hundred collectives."""
    before = _next_thread_state()
    for number in range(100):
        world.broadcast(number)
        world.all_gather(number)
        world.gather(number)
        world.sum(torch.ones(3))
        world.begin_sum(torch.ones(3))()
        average_statistics(RunningStatistics(nn.BatchNorm2d(3)).own, world)
    time.sleep(0.2)  # for a late one to be counted
    return {"entered": _next_thread_state() - before - 1}


def _next_thread_state() -> int:
    """The number of a new thread's state; they are counted through, for threads of Python and others."""
    python = ctypes.pythonapi
    python.PyThreadState_Get.restype = ctypes.c_void_p
    python.PyThreadState_GetID.argtypes = [ctypes.c_void_p]
    python.PyThreadState_GetID.restype = ctypes.c_uint64
    numbers: list[int] = []
    thread = threading.Thread(target=lambda: numbers.append(python.PyThreadState_GetID(python.PyThreadState_Get())))
    thread.start()
    thread.join()
    return numbers[0]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1))


def statistics(world: World) -> Found:
    """Without --sync-bn the running statistics become the mean over the ranks, the same everywhere."""
    raw = net()
    model = smart_DDP(raw)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(world.rank)) + world.rank
    model(images).sum().backward()
    own = raw[1].running_mean.tolist()
    average_statistics(RunningStatistics(raw).own, world)
    return {"own": own, "mean": raw[1].running_mean.tolist()}


def main() -> None:
    device = os.environ.get("DEVICE", "cpu")
    with mock.patch.object(Accelerator, "group_waits_for_all", True), suppress(UserError), open_world(device):
        raise UserError("a mistake before the call that succeeds")
    with open_world(device) as world:
        for name, _, argument in (word.partition("=") for word in sys.argv[1:]):
            found = globals()[name](world, *filter(None, [argument]))
            # One write, so that lines of ranks do not mix.
            sys.stdout.write(json.dumps({"program": name, "rank": world.rank, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_rank(main)[0])
