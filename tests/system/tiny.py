"""A small dataset, small flags, and comparisons of checkpoints, for whole trainings in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml

from tessera.analysis.charts import read_results
from tessera.data.labels.coco import COCO_NAMES
from tessera.deploy.foreign.synthetic_shapes import NAMES, write_shapes
from tessera.utils.files import sha256

FLAGS = (
    *("--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch", "8", "--workers", "1"),
    *("--device", "cpu", "--noplots", "--noreport", "--loggers", "none"),
)


def make_data(folder: Path, *, train: int = 24, val: int = 8, size: int = 96) -> Path:
    """Draw a small dataset of shapes, `size` pixels long; return its YAML."""
    write_shapes(folder / "shapes", train=train, val=val, size=size)
    content = {"path": str(folder / "shapes"), "train": "images/train", "val": "images/val", "names": list(NAMES)}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def label_in_part(data: Path) -> None:
    """Turn every third label into an ignored region, and let half of the training images label one class alone.

    The labels have scores as weights.
    """
    labels = sorted((data.parent / "shapes" / "labels").rglob("*.txt"))
    rows = [(label, row) for label in labels for row in label.read_text().splitlines()]
    for label in labels:
        label.write_text("")
    for number, (label, row) in enumerate(rows):
        with label.open("a") as file:
            file.write(row.replace(row.split()[0], "-1", 1) + "\n" if number % 3 == 0 else row + "\n")
    lines: list[dict[str, Any]] = [{"schema": "", "weights": "", "names": []}]
    for number, label in enumerate(labels):
        scores = [number % 5 / 4] * len(label.read_text().splitlines())
        lines.append({"labels": str(label), "sha256": sha256(label), "scores": scores})
    (data.parent / "shapes" / "labels" / "auto_labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    images = sorted(map(str, (data.parent / "shapes" / "images" / "train").iterdir()))
    for name, part in (("all", images[::2]), ("one", images[1::2])):
        (data.parent / f"{name}.txt").write_text("\n".join(part))
    train = [str(data.parent / "all.txt"), {"path": str(data.parent / "one.txt"), "labelled": [NAMES[1]]}]
    data.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "train": train, "label_weights": "score"}))


def describe_coco128(folder: Path, shared: Path) -> Path:
    """Write a YAML of coco128 to `folder`; training and validation images are the same."""
    content = {"path": str(shared / "coco128"), "train": "images/train2017", "val": "images/train2017"}
    path = folder / "coco128.yaml"
    path.write_text(yaml.safe_dump({**content, "names": list(COCO_NAMES)}))
    return path


def flags(data: Path, project: Path, *more: str) -> list[str]:
    return [*FLAGS, "--data", str(data), "--project", str(project), *more]


def losses(run: Path) -> pd.DataFrame:
    return read_results(run / "results.csv").filter(regex="^train/.*_loss$")


def tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its path."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {name: t for key, item in items for name, t in tensors(item, f"{prefix}.{key}").items()}


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Assert that tensors, epochs and counters of two checkpoints are equal, bit by bit."""
    first, second = (torch.load(path, weights_only=True) for path in (a, b))
    mine, theirs = tensors(first), tensors(second)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, f"{len(different)} of {len(mine)} tensors differ: {different[:5]}"
    for key in ("epoch", "step", "step_in_epoch", "best_fitness", "ema_updates", "stopper"):
        assert first[key] == second[key], key
