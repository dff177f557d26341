"""Accuracy and cost of arms, each a way to train: arms × sets × seeds as runs of train.py, and what their pairs say.

uv run python -m tests.benchmarks.ladder old="--cfg yolov5n.yaml" adamw="--cfg yolov5n.yaml --optimizer AdamW"
uv run python -m tests.benchmarks.ladder old="--cfg yolov5n.yaml" --sets cards raccoon --seeds 0 1 2 --jobs 2
uv run python -m tests.benchmarks.ladder --table runs/ladder/results.jsonl --against old

A seed is finished for all sets and arms before the next one begins. Every run that ends is a line of the results, and
is not run again: an interrupted campaign continues where it was, and a further arm or seed adds to it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import yaml

from tessera.models.summary import count_gflops, count_parameters
from tessera.utils.checkpoints.format import load_checkpoint
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.machine.limits import usable_cpus
from tessera.utils.report.results import read_results
from tests.benchmarks.paired import Run, append_run, read_runs, table
from tests.benchmarks.rounds import machine

ROOT = Path(__file__).resolve().parents[2]
SETS: Mapping[str, Mapping[str, object]] = {
    "cards": {
        "train": "images/train",
        "val": "images/val",
        "names": ["nine", "ten", "jack", "queen", "king", "ace"],
    },
    "raccoon": {"train": "images/train", "val": "images/val", "names": ["raccoon"]},
    "shapes": yaml.safe_load((ROOT / "data" / "shapes.yaml").read_text()),
    "coco128": yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text()),
}
FINE_TUNED = "coco128"  # from the official weights; the other sets from scratch
LAST_LINES = 12


@dataclass(frozen=True)
class Asked:
    """A run that is to be made.

    Attributes:
        arm, set, seed: which it is.
        flags: of train.py, but for those that name the seed, the data and the folder.
        data: dataset YAML.
        project: folder of runs.
        threads: that it computes with; None = as it chooses.
        timed: it has the machine for itself.
    """

    arm: str
    set: str
    seed: int
    flags: str
    data: Path
    project: Path
    threads: int | None
    timed: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.set}-{self.arm}-{self.seed}"

    def train(self) -> Run | str:
        """Run train.py; returns what it gave, or where it failed its last lines."""
        command = [sys.executable, str(ROOT / "train.py"), *shlex.split(self.flags), "--seed", str(self.seed)]
        command += ["--data", str(self.data), "--project", str(self.project), "--name", self.name, "--exist-ok"]
        env = os.environ if self.threads is None else {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        output = self.project / f"{self.name}.txt"
        started = time.perf_counter()
        with output.open("wb") as file:
            done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        if done.returncode:
            lines = output.read_text(errors="replace").replace("\r", "\n").splitlines()
            return "\n".join([f"exit code {done.returncode}, {output} ends with", *lines[-LAST_LINES:]])
        return self._read(seconds)

    def _read(self, seconds: float) -> Run:
        """What the folder of the finished run says."""
        folder = self.project / self.name
        last = load_checkpoint(folder / "weights" / "last.pt")
        epochs = read_results(folder / "results.csv").set_index("epoch")
        best_epoch = int(last["stopper"]["best_epoch"])
        model = model_of_weights(load_weights(folder / "weights" / "last.pt"), "last.pt")
        return Run(
            *(self.arm, self.set, self.seed, self.flags),
            map=float(epochs["metrics/mAP_0.5:0.95"][best_epoch]),
            map50=float(epochs["metrics/mAP_0.5"][best_epoch]),
            best_epoch=best_epoch,
            seconds=round(seconds, 2),
            epochs_s=round(float(epochs["time/epoch_s"].sum()), 2),
            images_per_s=float(epochs["images_per_s"].median()),
            timed=self.timed,
            updates=last["step"] - last["skipped_steps"],
            parameters=count_parameters(model),
            gflops=round(count_gflops(model, last["imgsz"]), 4),
            commit=last["git"],
        )


def campaign(given: argparse.Namespace, arms: Mapping[str, str]) -> list[Asked]:
    """All runs that were asked for, in their order, with the datasets' YAMLs beside their folders.

    Raises:
        ValueError: a set is not there.
    """
    given.project.mkdir(parents=True, exist_ok=True)
    threads = None if given.jobs <= 1 else max(usable_cpus() // given.jobs, 1)
    seeds, sets, asked = dict.fromkeys(given.seeds), dict.fromkeys(given.sets), []
    for seed, set_name, (arm, flags) in itertools.product(seeds, sets, arms.items()):
        start = f"--epochs {given.epochs}"
        if set_name == FINE_TUNED:
            weights = given.shared / "weights" / "yolov5n.pt"
            start = f"--epochs {given.finetune_epochs} --weights {shlex.quote(str(weights))}"
        # The arm's flags come last, and win.
        whole = f"{given.common} --patience 0 --noplots --loggers none {start} {flags}"
        data = write_yaml(set_name, given.shared, given.project)
        timed = given.jobs == 1 and not given.untimed
        asked.append(Asked(arm, set_name, seed, whole, data, given.project, threads, timed))
    return asked


def write_yaml(name: str, shared: Path, folder: Path) -> Path:
    """The YAML of a set where it lies; of the drawn one, which lies in the folder of datasets, the program's own.

    Raises:
        ValueError: the set is not there.
    """
    content = {**SETS[name]}
    if "generate" not in content:
        content.pop("download", None)
        content["path"] = str((shared / name).resolve())
        if not (shared / name).is_dir():
            raise ValueError(
                f"--shared {shared}: it has no folder '{name}'. Give the folder of the sets, or other --sets."
            )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def missing(asked: Sequence[Asked], runs: Sequence[Run]) -> list[Asked]:
    """Those that are not in the results yet.

    Raises:
        ValueError: the results have such a run with other flags.
    """
    known = {run.key: run for run in runs}
    for one in asked:
        run = known.get((one.arm, one.set, one.seed))
        if run is not None and run.flags != one.flags:
            raise ValueError(
                f"arm {one.arm} on {one.set}, seed {one.seed}: the results have it with the flags\n  {run.flags}\n"
                f"but asked for is\n  {one.flags}\nGive the arm another name, or another --results."
            )
    return [one for one in asked if (one.arm, one.set, one.seed) not in known]


def named(arms: Sequence[str]) -> dict[str, str]:
    """NAME=FLAGS as name → flags.

    Raises:
        ValueError: one has no name, or a name that no folder can have, or that of another.
    """
    found: dict[str, str] = {}
    for text in arms:
        name, equals, flags = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name) or name in found:
            raise ValueError(f"found the arm '{text}', expected one name=flags of train.py for each arm.")
        found[name] = flags
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("arms", nargs="*", metavar="NAME=FLAGS", help="flags of train.py that make the arm")
    flags.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--epochs", type=int, default=60, help="from scratch")
    flags.add_argument("--finetune-epochs", type=int, default=20, help=f"of {FINE_TUNED}, from shared/weights")
    flags.add_argument("--common", default="--imgsz 320 --batch-size 16", help="flags of every run")
    flags.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of the sets and weights; read")
    flags.add_argument("--project", type=Path, default=ROOT / "runs" / "ladder", help="folder of runs")
    flags.add_argument("--results", type=Path, help="JSON lines, one a run (default: results.jsonl in the project)")
    flags.add_argument("--jobs", type=int, default=1, help="runs at once, each with its share of the cores; untimed")
    flags.add_argument("--untimed", action="store_true", help="other work runs beside: seconds are not comparable")
    flags.add_argument("--against", metavar="NAME", help="arm that the others are compared with (default: the first)")
    flags.add_argument("--table", type=Path, metavar="FILE", help="print what a file of results says; run nothing")
    return flags


def run_all(asked: Sequence[Asked], results: Path, jobs: int) -> int:
    """Run them, `jobs` at once, and add what they give to the results; returns how many failed."""
    failed = 0
    with ThreadPool(jobs) as pool:
        for done, (one, run) in enumerate(pool.imap_unordered(lambda one: (one, one.train()), asked), start=1):
            where = f"{done}/{len(asked)} {one.name}"
            if isinstance(run, Run):
                append_run(results, run)
                print(f"{where}: mAP50-95 {run.map:.4f}, mAP50 {run.map50:.4f}, {run.seconds:.0f} s", flush=True)
            else:
                failed += 1
                print(f"{where}: failed, {run}", flush=True)
    return failed


def main() -> int:
    """Run what is missing and print the tables; returns 1 where a run failed."""
    flags = parser()
    given = flags.parse_intermixed_args()
    results, failed = given.table or given.results or given.project / "results.jsonl", 0
    try:
        arms, runs = named(given.arms), read_runs(results)
        against = given.against or next(iter(arms), None)
        known = {**arms, **{run.arm: run.flags for run in runs}}
        if not known or (against is not None and against not in known):
            raise ValueError(f"{results}: found no {against or 'arm'}, and it is not given as NAME=FLAGS either.")
        if given.table is None:
            left = missing(campaign(given, arms), runs)
            results.parent.mkdir(parents=True, exist_ok=True)
            print(f"{machine()}; runs to do: {len(left)}", flush=True)
            failed = run_all(left, results, given.jobs)
        print("\n".join(["", *table(read_runs(results), against)]))
    except ValueError as error:
        flags.error(str(error))
    except KeyboardInterrupt:
        print(f"Interrupted; the same command continues. {results} has what is done.")
        return 130
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
