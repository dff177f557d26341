"""A dry run of COCO's size: the first steps of 300 epochs, those where mosaic closes, and the last, by train.py itself.

    uv run python -m tests.benchmarks.coco_scale --folder /data/coco-size
    uv run python -m tests.benchmarks.coco_scale --folder /data/coco-size --batch 16    # four batches a step

Two ranks on the CPU, 64 pixels, 118,287 images (tests/data/made_coco.py). Between the three parts the checkpoint is set
to where the next begins. What each step does is written down by the ranks and compared with what the recipe says, which
is computed here once more. The dataset is made once and stays in the folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.data.feed.sampler import EpochOrder, batches_per_epoch
from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint, save_checkpoint
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.engine.schedule import Schedule
from tests.benchmarks.rounds import machine, parser
from tests.data.made_coco import IMAGES, write_coco
from tests.system.launch import ROOT, torchrun

RECIPE, EPOCHS, RANKS, IMGSZ, SEED = "hyp.tessera-long.yaml", 300, 2, 64, 0
CLOSED = 15  # epochs without mosaic, the last ones
AWAY = 0.1
Step = dict[str, Any]


class DryRun:
    """The run, part by part.

    Args:
        folder: of the dataset and the run.
        cfg: model YAML.
        batch_size: images a batch over both ranks.
        images: to train on.
    """

    def __init__(self, folder: Path, cfg: str, batch_size: int, images: int) -> None:
        self.folder, self.batch_size, self.images = folder, batch_size, images
        self.hyp: Hyp = load_hyp(RECIPE)
        self.batches = batches_per_epoch(images, batch_size)
        self.schedule = Schedule(self.hyp, EPOCHS, self.batches, batch_size)
        self.last = folder / "run" / "exp" / "weights" / "last.pt"
        self._seen = folder / "run" / "seen"
        yaml = write_coco(folder, images)
        shutil.rmtree(folder / "run", ignore_errors=True)
        self._seen.parent.mkdir()
        os.environ["TESSERA_CACHE"] = str(folder / "cache")
        flags = f"--cfg {cfg} --epochs {EPOCHS} --batch-size {batch_size} --imgsz {IMGSZ} --patience 0 --seed {SEED}"
        self._fresh = [*flags.split(), "--data", str(yaml), "--project", str(folder / "run"), "--noplots"]
        self._fresh += ["--loggers", "none"]

    def part(self, name: str, steps: int, *, ends: bool = False) -> list[Step]:
        """Train until `steps` steps are done, or to the end of the run; print and check them.

        Returns:
            The steps of rank 0.
        """
        flags = ["--resume", str(self.last)] if self.last.is_file() else self._fresh
        started = time.time()
        said = torchrun(
            ROOT / "tests" / "benchmarks" / "coco_rank.py",
            *flags,
            *("--device", "cpu", "--workers", "1"),
            ranks=RANKS,
            env={"SEEN": str(self._seen), "STEPS": str(0 if ends else steps)},
        )
        assert (said.code == 0) == ends and self.last.is_file(), said.said
        ranks = [
            [json.loads(line) for line in Path(f"{self._seen}.{rank}").read_text().splitlines()]
            for rank in range(RANKS)
        ]
        peaks = [rank.pop() for rank in ranks]
        first = ranks[0][0]
        print(
            f"{name}: first batch after {first['batch_at'][0] - started:.1f} s, first step after "
            f"{first['done_at'] - started:.1f} s, all {time.time() - started:.1f} s; peak of a rank "
            f"{max(own for own, _ in peaks)} MiB, of its worker {max(worker for _, worker in peaks)} MiB"
        )
        print("| epoch, batch | images | learning rate: biases, weights | momentum | EMA | read an image | gradient |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for steps_of_ranks in zip(*ranks, strict=True):
            self.check(steps_of_ranks)
            print(self.row(steps_of_ranks[0]), flush=True)
        return ranks[0]

    def go_to(self, epoch: int, steps_left: int) -> None:
        """Set the checkpoint to where so many steps are left of `epoch`."""
        starts = [0]
        while starts[-1] < self.batches:
            starts.append(starts[-1] + self.schedule.window(epoch * self.batches + starts[-1]))
        done = dataclasses.replace(self.schedule, epochs=epoch).steps() + len(starts) - 1 - steps_left
        saved = load_checkpoint(self.last)
        saved |= {"epoch": epoch, "step_in_epoch": starts[-1 - steps_left], "step": done, "ema_updates": done}
        for key, value in saved["ema"].items():  # away from the weights, so that the way of a step is no rounding error
            if "bias" in key:
                value += AWAY
        saved |= {"epoch_losses": torch.zeros_like(saved["epoch_losses"]), "epoch_skipped": 0, "skipped_steps": 0}
        save_checkpoint(self.last, saved)

    def row(self, step: Step) -> str:
        """A step in the table."""
        images = sum(map(len, step["images"]))
        rates = ", ".join(f"{rate:.6f}" for rate in step["rates"][:2])
        return (
            f"| {step['epoch']}, {step['batch']} | {RANKS * images} | {rates} | {step['momentum']:.4f} | "
            f"{1 - step['ema_moved']:.6f} | {sum(step['read']) / images:.2f} | {step['norm']:.1f} |"
        )

    def check(self, ranks: tuple[Step, ...]) -> None:
        """Raise where a step is not what the recipe says, or the ranks differ."""
        hyp, step = self.hyp, ranks[0]
        for other in ranks[1:]:
            for key in set(step) - {"images", "read", "batch_at", "done_at", "ema_moved"}:
                assert other[key] == step[key], (key, other[key], step[key])
        # A line from lr0 to lr0 · lrf by the epoch; for three epochs a line towards it, by the batch.
        end = step["epoch"] * self.batches + step["batch"] + step["window"] - 1
        share = min(end / (hyp.warmup_epochs * self.batches), 1.0)
        target = hyp.lr0 * (1 - (1 - hyp.lrf) * step["epoch"] / EPOCHS)
        bias, weight = hyp.warmup_bias_lr * (1 - share) + target * share, target * share
        assert np.allclose(step["rates"], (bias, weight, weight), rtol=1e-9, atol=0), (step["rates"], bias, weight)
        momentum = hyp.warmup_momentum * (1 - share) + hyp.momentum * share
        assert math.isclose(step["momentum"], momentum), (step["momentum"], momentum)
        # Batches up to 64 images, growing in the warm-up; cut off at the epoch's end.
        wanted = max(round(1 + (hyp.nominal_batch / self.batch_size - 1) * share), 1)
        left = self.batches - step["batch"]
        assert step["window"] == min(wanted, left), (step["window"], wanted, left)
        full = self.batch_size * max(round(hyp.nominal_batch / self.batch_size), 1)
        decays = (0.0, hyp.weight_decay * full / hyp.nominal_batch, 0.0)
        assert np.allclose(step["weight_decay"], decays), (step["weight_decay"], decays)
        moved = max(1 / (1 + hyp.ema_share * step["updates"]), 1e-4)
        assert all(math.isclose(rank["ema_moved"], moved, rel_tol=0.01) for rank in ranks), (step["ema_moved"], moved)
        assert math.isfinite(step["norm"])
        order = EpochOrder(self.images, self.batch_size, SEED, IMGSZ).plan(step["epoch"])[0]
        mosaic = step["epoch"] < EPOCHS - CLOSED
        for number in range(step["window"]):
            batch = step["batch"] + number
            got = [image for rank in ranks for image in rank["images"][number]]
            assert len(got) == self.batch_size and len({len(rank["images"][number]) for rank in ranks}) == 1
            assert got == order[batch * self.batch_size :][: self.batch_size].tolist()
            assert len(set(got)) == self.batch_size
            for rank in ranks:
                read, own = rank["read"][number], len(rank["images"][number])
                assert read > own if mosaic else read == own, (step["epoch"], batch, read, own)
            if batch == self.batches - 1:  # filled from the start of the epoch's order
                missing = self.batches * self.batch_size - self.images
                assert got[self.batch_size - missing :] == order[:missing].tolist()


def main() -> None:
    given = parser(
        __doc__,
        folder=Path("/tmp/tessera-coco-size"),
        cfg="tessera-n.yaml",
        batch=(128, "over both ranks"),
        images=IMAGES,
    ).parse_args()
    print(machine())
    run = DryRun(given.folder.resolve(), given.cfg, given.batch, given.images)
    first = run.part("The first steps", 5)
    assert (first[0]["epoch"], first[0]["batch"]) == (0, 0)
    began = load_checkpoint(run.last)["config"]["hyp"]
    assert began == RECIPE, f"the run took {began} by itself"
    run.go_to(EPOCHS - CLOSED - 1, steps_left=2)
    closing = run.part("Mosaic closes", 5)
    assert {step["epoch"] for step in closing} == {EPOCHS - CLOSED - 1, EPOCHS - CLOSED}
    run.go_to(EPOCHS - 1, steps_left=5)
    end = run.part("The last steps", 5, ends=True)
    assert end[-1]["batch"] + end[-1]["window"] == run.batches and len(end) == 5
    saved, best = load_checkpoint(run.last), load_any_checkpoint(run.last.with_name("best.pt"))
    steps = run.schedule.steps()
    assert (saved["epoch"], saved["step"], saved["ema_updates"]) == (EPOCHS, steps, steps), saved["step"]
    assert saved["metrics"] is not None and best["metrics"] is not None
    rows = (run.last.parents[1] / "results.csv").read_text().splitlines()
    print(f"{run.batches} batches an epoch, {steps:,} steps; last row of results.csv: {rows[-1]}")


if __name__ == "__main__":
    main()
