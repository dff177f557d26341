"""Memory: of the image cache over ranks and workers, of a step.

uv run python -m tests.benchmarks.memory --data coco128.yaml
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import build_train_loader
from tessera.models.detector import DetectionModel
from tessera.utils.config import load_hyp
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import keep_malloc_memory
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import torch_distributed_zero_first
from tests.benchmarks.harness import indexed, machine, parser, repeated
from tests.benchmarks.step import Case, made_batch, our_step, plain_step
from tests.data.made_run import made_run

MIB = 2**20


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(d for child in children for d in descendants(int(child)))]


def pss(pids: list[int]) -> int:
    """Bytes that the processes hold, pages that several share divided among them."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def rank_program(data: str, times: int, imgsz: int, cache: str) -> None:
    """One rank of `memory_of`: two epochs, then the memory of all ranks is measured."""
    with open_world("cpu") as world:
        with torch_distributed_zero_first(world.local_rank, world):
            index = repeated(indexed(data), times)
        store = open_images(index, imgsz, cache, "linear", world)  # type: ignore[arg-type]
        flags = {"imgsz": imgsz, "batch_size": 8 * world.size, "epochs": 10**6, "workers": 2}
        with build_train_loader(made_run(load_hyp("hyp.scratch-low.yaml"), world, **flags), store) as loader:
            for epoch in range(2):
                for _ in loader.batches(epoch):
                    pass
            world.barrier()
            shares = world.all_gather(pss(descendants(os.getpid())))
            if world.is_main:
                print("MEASURED", sum(shares), flush=True)
            world.barrier()


def memory_of(data: str, times: int, imgsz: int, cache: str, ranks: int) -> float:
    """MiB of all processes of a loader on some ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.benchmarks.memory", "--rank-program", cache, "--data", data, "--imgsz", str(imgsz)]
    command += ["--times", str(times)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    return next(int(line.split()[1]) / MIB for line in said.splitlines() if line.startswith("MEASURED"))


def peak_of(which: str, data: str, cfg: str) -> float:
    """Largest resident size of a process that does nothing but steps, in MiB."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", "--peak-program", which, "--data", data]
    command += ["--cfg", cfg]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    return float(said.split()[-1])


def peak_program(which: str, data: str, cfg: str) -> None:
    """Five steps of a model at 320 pixels, batch 16, float32 or bfloat16."""
    index = indexed(data)
    make = plain_step if which == "plain" else our_step
    if which != "plain":
        keep_malloc_memory()
    dtype = torch.bfloat16 if which == "bf16" else torch.float32
    model = DetectionModel(cfg, names=index.names)
    step = make(Case(model, made_batch(index, 16, 320), 320, Accelerator()), dtype)
    for _ in range(5):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    given = parser(
        __doc__,
        data="shapes.yaml",
        imgsz=640,
        times=(1, "repetitions of the dataset, for the cache"),
        cfg=("yolov5n.yaml", "the model whose peak is measured"),
        rank_program=("", argparse.SUPPRESS),
        peak_program=("", argparse.SUPPRESS),
    ).parse_args()
    if given.rank_program:
        return rank_program(given.data, given.times, given.imgsz, given.rank_program)
    if given.peak_program:
        return peak_program(given.peak_program, given.data, given.cfg)
    print(machine())
    for cache in ("ram", "disk", "none"):
        one, two = (memory_of(given.data, given.times, given.imgsz, cache, ranks) for ranks in (1, 2))
        print(f"  cache {cache}: {one:.0f} MiB in all processes of 1 rank, {two:.0f} of 2 ({two / one:.2f} x)")
    peaks = {which: peak_of(which, given.data, given.cfg) for which in ("plain", "fp32", "bf16")}
    said = ", ".join(f"{which} {peak:.0f} MiB ({peak / peaks['plain']:.2f} x)" for which, peak in peaks.items())
    print(f"  peak of a process that trains {given.cfg}, 320 pixels, batch 16: {said}")
    return None


if __name__ == "__main__":
    main()
