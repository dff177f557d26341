"""A whole run beside the bare compute of its steps and validations.

    uv run python -m tests.benchmarks.overhead --data cards.yaml --imgsz 192 --epochs 60

The run is train.py as a user starts it, from the command to the prompt. Bare are as many steps on a batch in memory,
and as many passes of the network over the pictures of a validation in memory, alone on the machine: timed before the
run and after it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tessera.data.feed.images import ImageStore
from tessera.data.feed.loader import build_val_loader
from tessera.data.feed.sampler import batches_per_epoch
from tessera.models.detector import DetectionModel
from tessera.utils.environment import Launch
from tessera.utils.machine.choose import choose_accelerator
from tessera.utils.ranks.world import World
from tessera.utils.report.results import read_results
from tessera.utils.runtime.checkpoint import fused_copy
from tests.benchmarks.rounds import indexed, machine, parser
from tests.benchmarks.step import Case, made_batch, our_step
from tests.system.launch import ROOT

STEPS = 10  # of a timing


def seconds(work: Callable[[], object], count: int = 1) -> float:
    """How long one of `count` takes."""
    started = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - started) / count


def main() -> None:
    """Print the table."""
    asked = parser(__doc__, data="shapes.yaml", cfg="tessera-n.yaml", imgsz=192, batch=16, epochs=12).parse_args()
    train, val = indexed(asked.data), indexed(asked.data, "val")
    torch.manual_seed(0)
    accelerator = choose_accelerator("cpu", Launch())
    world = World(accelerator=accelerator)
    model = DetectionModel(asked.cfg, names=train.names)
    case = Case(model, made_batch(train, asked.batch, asked.imgsz), asked.imgsz, accelerator)
    dtype = accelerator.native_dtype
    step, fused = our_step(case, dtype), fused_copy(model, accelerator)
    store = ImageStore(val, asked.imgsz, "area")
    with build_val_loader(store, world, batch_size=asked.batch, stride=model.stride, workers=0) as loader:
        pictures = [batch.images_on(accelerator.device) for batch in loader]

    @torch.no_grad()
    def validate() -> None:
        for images in pictures:
            fused(images)

    def bare() -> tuple[float, float]:
        steps = asked.epochs * batches_per_epoch(len(train), asked.batch)
        return steps * seconds(step, STEPS), asked.epochs * seconds(validate)

    bare()  # kernels, allocators
    before = bare()
    with tempfile.TemporaryDirectory(prefix="tessera-overhead-") as folder:
        flags = {name: getattr(asked, name) for name in ("data", "cfg", "imgsz", "epochs")} | {
            "batch-size": asked.batch
        }
        command = [sys.executable, str(ROOT / "train.py"), "--project", folder, "--device", "cpu"]
        command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        whole = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
        table = read_results(Path(folder) / "exp" / "results.csv")
    print(machine())
    for steps, validations in (before, bare()):
        total = steps + validations
        print(
            f"bare: {steps:.1f} s of steps in {dtype}, {validations:.1f} s of validations; whole {whole / total:.3f} x"
        )
    epochs = table["time/epoch_s"]
    print(f"whole: {whole:.1f} s, of which epochs {epochs.sum():.1f} s, the median {epochs.median():.2f} s")
    print(f"waiting for pictures: {(table['time/data_wait'] * epochs).sum():.1f} s at most")


if __name__ == "__main__":
    main()
