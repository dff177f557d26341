"""The start of several ranks of a node on a large dataset, up to the comparison of their data.

    uv run python -m tests.benchmarks.start_ranks --images 1000000 --ranks 4 --folder /data/million

"each for itself" lists all files and hashes all names on every rank, as if there were no first one; "handed on" is what
train.py does. The dataset, hard links of a few small pictures and labels, is made once and stays in the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.flags.program import HOME
from tessera.utils.ranks.consistency import data_fingerprint, require_agreement
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import torch_distributed_zero_first
from tessera.utils.types import DatasetIndex
from tests.benchmarks.rounds import machine, parser
from tests.data.make import write_image
from tests.system.launch import free_port

_OWN = 40  # files of each kind; the others are links to them: a file system allows some ten thousand of one file
_OBJECTS = 7


def make(folder: Path, images: int) -> Path:
    """A dataset of `images` images; its YAML. One that is there already is used as it is."""
    yaml = folder / "million.yaml"
    if yaml.is_file():
        return yaml
    rng = np.random.default_rng(0)
    for kind in ("images", "labels", "own"):
        (folder / kind).mkdir(parents=True)
    for number in range(_OWN):
        write_image(folder / "own" / f"{number}.jpg")
        rows = [f"0 {' '.join(f'{side:.4f}' for side in box)}\n" for box in rng.uniform(0.2, 0.4, (_OBJECTS, 4))]
        (folder / "own" / f"{number}.txt").write_text("".join(rows))
    for number in range(images):
        for kind, suffix in (("images", "jpg"), ("labels", "txt")):
            os.link(folder / "own" / f"{number % _OWN}.{suffix}", folder / kind / f"{number:07d}.{suffix}")
    yaml.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n")
    return yaml


def hash_by_paths(index: DatasetIndex) -> str:
    """The names of all images, hashed one path after the other."""
    return hashlib.blake2b("\0".join(index.path(i).name for i in range(len(index))).encode()).hexdigest()


def start(yaml: Path, each_for_itself: bool) -> None:
    """One rank; prints seconds, its CPU seconds and its peak memory in MiB as JSON."""
    with open_world("cpu") as world:
        world.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with torch_distributed_zero_first(world.local_rank, world) as verified:
            index = build_index(load_spec(yaml), "train", verified=None if each_for_itself else verified)
        if each_for_itself:
            for _ in range(3):  # for train, for val, and for the checkpoint
                hash_by_paths(index)
        require_agreement(data_fingerprint({"train": index}), world)
        index.content_hash()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, peak]), flush=True)


def measure(yaml: Path, ranks: int, *more: str) -> str:
    """Start all ranks; what they took, in words."""
    port = free_port()
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(ranks)
    ]
    command = [sys.executable, "-m", "tests.benchmarks.start_ranks", "--rank-of", str(yaml), *more]
    processes = [
        subprocess.Popen(
            command, cwd=HOME, env={**os.environ, **{key: str(value) for key, value in place.items()}}, stdout=-1
        )
        for place in places
    ]
    found = [json.loads(process.communicate()[0]) for process in processes]
    walls, cpus, peaks = zip(*found, strict=True)
    return f"{max(walls):.1f} s, {sum(cpus):.1f} CPU seconds of all ranks, peak of a rank {max(peaks)} MiB"


def main() -> None:
    given = parser(
        __doc__,
        images=20_000,
        ranks=4,
        folder=Path("/tmp/tessera-million"),
        rank_of=("", argparse.SUPPRESS),
        each_for_itself=(False, argparse.SUPPRESS),
    ).parse_args()
    if given.rank_of:
        start(Path(given.rank_of), given.each_for_itself)
        return
    print(machine())
    folder = given.folder.resolve()
    os.environ["TESSERA_CACHE"] = str(folder / "cache")
    yaml = make(folder, given.images)
    print(f"  first start of {given.ranks} ranks: {measure(yaml, given.ranks)}")
    print(f"  another, each for itself: {measure(yaml, given.ranks, '--each-for-itself')}")
    print(f"  another, handed on: {measure(yaml, given.ranks)}")


if __name__ == "__main__":
    main()
