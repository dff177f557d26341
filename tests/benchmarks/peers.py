"""Whole trainings by Tessera, YOLOv5 and Ultralytics, interleaved, where a user has installed these.

    python -m tests.benchmarks.peers --data coco128.yaml --yolov5 ~/yolov5 --yolov5-python ~/yolov5/.venv/bin/python
    make bench-peers DATA=my.yaml YOLOV5=~/yolov5 YOLOV5_PYTHON=~/yolov5/.venv/bin/python YOLO=~/venv/bin/yolo

Each is started by its command line with the same images, labels, size, batch, epochs, device and workers, from scratch.
Seconds of an epoch are those between the rows of its results.csv, without the first; mAP50-95 is its own, of the best
epoch. Medians of all rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.flags.options import version_line
from tests.benchmarks.harness import machine, parser
from tests.system.launch import ROOT

MAPS = ("metrics/mAP_0.5:0.95", "metrics/mAP50-95(B)")  # as results.csv of the three names it
BETWEEN_LOOKS_S = 0.05
_VERSION = re.compile(r"(?:YOLOv5|Ultralytics).*torch-.*")
_NO_WORDS = re.compile(r"\x1b\[[0-9;]*m|[^ -~\n]")  # colours, emoji


class Rival(NamedTuple):
    """A program with a model; its flags are written `--name value`, or `name=value` where `assigns`."""

    name: str
    command: Sequence[str]
    model: dict[str, str]
    assigns: bool = False


class Measured(NamedTuple):
    """One training: seconds of all, seconds of an epoch after the first, mAP50-95 of the best epoch."""

    run_s: float
    epoch_s: float
    best_map: float


def rivals(yolov5: str, yolov5_python: str, yolo: str) -> list[Rival]:
    """What is here; a line for what is not."""
    tessera = [sys.executable, str(ROOT / "train.py")]
    found = [Rival(f"Tessera, {name}", tessera, {"cfg": f"{name}.yaml"}) for name in ("tessera-n", "yolov5n")]
    script, python = Path(yolov5).expanduser() / "train.py", shutil.which(Path(yolov5_python).expanduser())
    if yolov5 and script.is_file() and python:
        found.append(Rival("YOLOv5, yolov5n", [python, str(script)], {"cfg": "yolov5n.yaml", "weights": ""}))
    else:
        print("YOLOv5: not installed here: name the folder of a clone by --yolov5, its Python by --yolov5-python")
    if command := shutil.which(Path(yolo).expanduser()):
        for name in ("yolov5n", "yolov8n", "yolo11n", "yolo26n"):
            model = {"model": f"{name}.yaml", "pretrained": "False"}
            found.append(Rival(f"Ultralytics, {name}", [command, "detect", "train"], model, assigns=True))
    else:
        print("Ultralytics: not installed here: name the command by --yolo, such as ~/venv/bin/yolo")
    return found


def copied(data: str, folder: Path) -> Path:
    """Copy the dataset, in the layout that all programs read; return its YAML."""
    spec = load_spec(data)
    for split in ("train", "val"):
        index = build_index(spec, split)
        for image in range(len(index)):
            target = folder / "images" / split / f"{image:06}{index.path(image).suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(index.path(image), target)
            classes, boxes = index.labels(image)
            middles, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
            shares = np.hstack([middles, sizes]) / np.tile(index.sizes_hw[image][::-1], 2)
            rows = [" ".join(map(str, (c, *row))) for c, row in zip(classes.tolist(), shares.tolist(), strict=True)]
            labels = folder / "labels" / split / f"{image:06}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text("\n".join(rows))
    names = dict(enumerate(spec.names))
    text = yaml.safe_dump({"path": str(folder), "train": "images/train", "val": "images/val", "names": names})
    (target := folder / f"{spec.name}.yaml").write_text(text, "utf-8")
    return target


def command_line(rival: Rival, data: Path, project: Path, asked: argparse.Namespace) -> list[str]:
    """Of a training in the folder `project`."""
    size, batch = ("imgsz", "batch") if rival.assigns else ("img", "batch-size")
    flags = {"data": str(data), size: asked.imgsz, batch: asked.batch, "epochs": asked.epochs, "device": asked.device}
    flags |= {"workers": asked.workers, "project": str(project), "name": "run", **rival.model}
    if rival.assigns:
        return [*rival.command, *(f"{name}={value}" for name, value in flags.items())]
    return [*rival.command, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def measure(command: Sequence[str], project: Path) -> tuple[Measured, str]:
    """One training, and the line in which the program says what it is.

    Raises:
        RuntimeError: it did not end well, or wrote no results.csv with the rows of two epochs or more.
    """
    project.mkdir(parents=True)
    said, began, seen = project / "said.txt", time.perf_counter(), list[float]()  # when each row was first there
    quiet = {**os.environ, "WANDB_MODE": "disabled"}  # which would ask for an account
    with said.open("wb") as log:
        process = subprocess.Popen(command, cwd=project, env=quiet, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ended, table = False, project / "run" / "results.csv"
        while not ended:
            ended = process.poll() is not None
            rows = table.read_bytes().count(b"\n") - 1 if table.is_file() else 0
            seen += [time.perf_counter()] * (rows - len(seen))
            time.sleep(0 if ended else BETWEEN_LOOKS_S)
    run_s = time.perf_counter() - began
    words = _NO_WORDS.sub("", said.read_text("utf-8", "replace"))
    if process.returncode or len(seen) < 2:
        end = "\n".join(words.splitlines()[-5:])
        raise RuntimeError(f"exit code {process.returncode}, {len(seen)} rows of results.csv\n{end}")
    best = pd.read_csv(table, skipinitialspace=True).rename(columns=str.strip).max()
    epoch_s = max(seen[-1] - seen[0], BETWEEN_LOOKS_S) / (len(seen) - 1)
    version = _VERSION.search(words)
    found = Measured(run_s, epoch_s, float(next((best[name] for name in MAPS if name in best), "nan")))
    return found, " ".join(version[0].split()) if version else "it does not say its version"


def row(name: str, found: Sequence[Measured], baseline: Sequence[Measured]) -> str:
    """A line of the table."""
    cells = [f"{name:24}"]
    for values, others, unit in zip(zip(*found, strict=True), zip(*baseline, strict=True), "ssm", strict=True):
        middle, digits = statistics.median(values), 2 if unit == "s" else 4
        cell = f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
        cells.append(f"{cell:28}" + (f"{middle / statistics.median(others):5.2f} x   " if unit == "s" else ""))
    return "".join(cells).rstrip()


def main() -> None:
    """Print the table."""
    flags = parser(
        __doc__,
        data="shapes.yaml",
        imgsz=640,
        batch=16,
        epochs=(3, "two or more"),
        device=("cpu", "cpu, or the number of a CUDA device"),
        workers=(2, "loader workers"),
        rounds=3,
        yolov5=("", "folder of a clone of YOLOv5"),
        yolov5_python=("python3", "interpreter that runs it"),
        yolo=("yolo", "Ultralytics' command"),
    )
    asked = flags.parse_args()
    here = rivals(asked.yolov5, asked.yolov5_python, asked.yolo)
    found: dict[str, list[Measured]] = {rival.name: [] for rival in here}
    versions = {"Tessera": version_line()}
    with tempfile.TemporaryDirectory(prefix="tessera-peers-") as home:
        data = copied(asked.data, Path(home) / "data")
        for number in range(asked.rounds):
            for rival in [one for one in here if one.name in found]:
                project = Path(home) / f"{rival.name}-{number}"
                try:
                    measured, version = measure(command_line(rival, data, project, asked), project)
                except RuntimeError as error:
                    print(f"{rival.name}: {error}")
                    del found[rival.name]
                    continue
                found[rival.name].append(measured)
                versions.setdefault(rival.name.partition(",")[0], version)
    print(machine())
    print("\n".join(f"{name}: {version}" for name, version in versions.items()))
    print(
        f"{asked.data}: {asked.imgsz} px, batch {asked.batch}, {asked.epochs} epochs, {asked.rounds} interleaved rounds"
    )
    print("median (lowest to highest), and its ratio to the first row's")
    print(f"{'':24}{'s of a run':40}{'s of an epoch after the first':40}mAP50-95, by its own word")
    for name, measurements in found.items():
        print(row(name, measurements, next(iter(found.values()))))


if __name__ == "__main__":
    main()
