"""What it is worth to mark objects as ignored: recall of the kinds whose objects mostly have no label.

    uv run python -m tests.benchmarks.ignored
    uv run python -m tests.benchmarks.ignored --seeds 0 1 2 --epochs 30

Scenes of drawn shapes. Of the stars and of the rings six in ten, a tenth of all objects each, lose their label: the
stars' rows become class -1, regions to ignore, or go as the rings' do, which teaches that they are background. The
validation has all labels. A line an arm: the share of stars, of rings and of the others that is found above a
confidence of 0.25 and an IoU of 0.5, and AP50 of the three.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import tessera
from tessera.data.source.shapes import NAMES, render_image, write_shapes
from tessera.utils.evaluation.matching import match_image
from tessera.utils.types import Detections
from tests.benchmarks.rounds import machine

LOST = 0.6  # share of the two kinds' objects without a label
VAL = 100  # images
KINDS = {"stars": ["star"], "rings": ["ring"], "others": [name for name in NAMES if name not in ("star", "ring")]}
ARMS = {  # which of the two kinds are marked, of those that lose labels
    "both unlabelled": [],
    "stars ignored, rings unlabelled": ["star"],
    "all labelled": None,
}


def write_arm(root: Path, images: int, marked: list[str] | None) -> Path:
    """Scenes with the labels of an arm; returns their YAML."""
    write_shapes(root, train=images, val=VAL)
    chance = np.random.default_rng(0)
    for label in sorted((root / "labels" / "train").iterdir()):
        rows = []
        for row in label.read_text().splitlines():
            number, box = row.split(" ", 1)
            kind = NAMES[int(number)]
            if chance.random() < LOST and kind in ("star", "ring") and marked is not None:
                rows += [f"-1 {box}\n"] * (kind in marked)
            else:
                rows.append(f"{row}\n")
        label.write_text("".join(rows))
    yaml = root.with_suffix(".yaml")
    yaml.write_text(f"path: {root}\ntrain: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n")
    return yaml


def recalls(weights: Path, root: Path) -> NDArray[np.float64]:
    """Share of the validation's objects of each class that are found."""
    detector = tessera.Detector(weights, conf_thres=0.25)
    found, objects = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for result in detector(root / "images" / "val"):
        _, classes, boxes_xyxy = render_image("val", int(Path(result.source).stem))
        detections = Detections(*(torch.tensor(part) for part in (result.boxes_xyxy, result.scores, result.classes)))
        matches = match_image(detections, boxes_xyxy, classes)
        found += np.bincount(matches.classes[matches.correct[:, 0]], minlength=len(NAMES))
        objects += np.bincount(classes, minlength=len(NAMES))
    return found / objects


def main() -> None:
    """Train every arm with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--images", type=int, default=640)
    asked = parser.parse_args()
    print(f"{machine()}; {asked.images} scenes, {asked.epochs} epochs of tessera-n at 128 px, seeds {asked.seeds}")
    print(f"{'':<34}recall: {'  '.join(KINDS)}   AP50: {'  '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        for arm, marked in ARMS.items():
            root = Path(folder) / arm.replace(" ", "-").replace(",", "")
            yaml = write_arm(root, asked.images, marked)
            figures = []
            for seed in asked.seeds:
                project = Path(folder) / "runs"
                flags = {"imgsz": 128, "epochs": asked.epochs, "seed": seed, "noplots": True, "noval": True}
                metrics = tessera.train(data=str(yaml), project=str(project), name=f"{root.name}-{seed}", **flags)
                found = recalls(project / f"{root.name}-{seed}" / "weights" / "best.pt", root)
                by_class = found, metrics.per_class[:, 2]
                figures.append(
                    [row[[NAMES.index(n) for n in names]].mean() for row in by_class for names in KINDS.values()]
                )
            print(f"{arm:<34}{'  '.join(f'{figure:7.3f}' for figure in np.mean(figures, 0))}", flush=True)


if __name__ == "__main__":
    main()
