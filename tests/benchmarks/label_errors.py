"""How well `val.py --find-errors` finds planted errors, beside cleanlab's ObjectLab (Tkachenko et al. 2023).

    uv run python -m tests.benchmarks.label_errors --weights runs/train/exp/weights/best.pt --data shapes.yaml
    uv run --with cleanlab python -m tests.benchmarks.label_errors …       # cleanlab's figures too

A copy of the labels of `val` gets 5 % of each kind of error; the pictures are not copied. For each kind a line: which
share of the first k suspects of that kind are planted errors of it, k being how many were planted, and how many of the
planted errors are among all suspects. Then the same for all kinds in one ranking, and for pictures with any planted
error, ranked by their worst suspect. cleanlab has scores for three of the kinds, and for pictures.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.evaluation.evaluate import measure
from tessera.utils.evaluation.matching import pairwise_iou
from tessera.utils.evaluation.measurement import Settings
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.ranks.world import World
from tessera.utils.runtime.open_model import open_model
from tessera.utils.suspects.evidence import Suspicion
from tessera.utils.suspects.files import NAMES
from tessera.utils.suspects.ranking import suspects
from tessera.utils.suspects.sink import EvidenceSink
from tessera.utils.types import Batch, DatasetIndex, Detections
from tests.utils.suspects.planted import KINDS, Planted, plant

Claim = tuple[float, str, int, NDArray[np.float64]]  # score, kind, image, box in pixels
CLEANLAB_CONF = 0.5  # of detections that cleanlab counts as sure; by itself 0.95, with which it finds fewer errors


class Kept(Sink):
    def __init__(self) -> None:
        self.found: dict[int, Detections] = {}

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        self.found |= zip(batch.indices.tolist(), in_original, strict=True)


def planted_copy(data: str, folder: Path, split: str, share: float, seed: int) -> tuple[Path, list[Planted]]:
    """A YAML whose `split` has planted errors, and what they are."""
    spec = load_spec(data)
    index = build_index(spec, split)
    for kind in ("images", "labels"):
        (folder / kind / split).mkdir(parents=True)
    for i in range(len(index)):
        path = index.path(i)
        (folder / "images" / split / path.name).symlink_to(path)
        classes, boxes = index.labels(i)
        size = np.tile(index.sizes_hw[i][::-1], 2)
        rows = []
        for c, box in zip(classes.tolist(), boxes / size, strict=True):
            sides = (*(box[:2] + box[2:]) / 2, *(box[2:] - box[:2]))
            rows.append(f"{c} {' '.join(f'{side:.7f}' for side in sides)}\n")
        (folder / "labels" / split / f"{path.stem}.txt").write_text("".join(rows))
    planted = plant(folder / "labels" / split, share, spec.nc, seed)
    target = folder / "planted.yaml"
    splits = {"val": [str(path) for path in spec.splits["val"]], split: f"images/{split}"}
    target.write_text(yaml.safe_dump({"path": str(folder), **splits, "names": list(spec.names)}))
    return target, planted


def right(claims: Sequence[Claim], planted: Sequence[Planted], index: DatasetIndex) -> NDArray[np.bool_]:
    """Which claims are about a planted error of their kind that none before is about."""
    by_stem: dict[str, list[int]] = {}
    for row, error in enumerate(planted):
        by_stem.setdefault(error.stem, []).append(row)
    free = [True] * len(planted)
    found = np.zeros(len(claims), np.bool_)
    for number, (_, kind, image, box) in enumerate(claims):
        size = np.tile(index.sizes_hw[image][::-1], 2)
        for row in by_stem.get(index.path(image).stem, []):
            same = free[row] and planted[row].kind == kind
            if same and pairwise_iou(box[None], (planted[row].box * size)[None])[0, 0] >= 0.5:
                free[row], found[number] = False, True
                break
    return found


def report(name: str, claims: Sequence[Claim], planted: Sequence[Planted], index: DatasetIndex) -> None:
    for kind in (*KINDS, "all"):
        mine = sorted((c for c in claims if kind in (c[1], "all")), key=lambda claim: -claim[0])
        there = [error for error in planted if kind in (error.kind, "all")]
        found, k = right(mine, there, index), len(there)
        if mine:
            at = found[:k].sum() / k, found.sum() / k
            print(f"{name:>10}{kind:>14}: {k:>5} planted, in the first {k} {at[0]:.2f}, found {at[1]:.2f} of them")
    sure = [claim for claim in claims if claim[0] >= 0.5]  # that the console counts apart
    found = right(sure, planted, index).sum()
    shares = f"{found / max(len(sure), 1):.2f} of them planted, {found / len(planted):.2f} of all planted"
    print(f"{name:>10}{'from 0.5':>14}: {len(sure):>5} suspects, {shares}")
    worst: dict[int, float] = {}
    for score, _, image, _ in claims:
        worst[image] = max(score, worst.get(image, 0))
    pictures(name, worst, planted, index)


def pictures(name: str, worst: dict[int, float], planted: Sequence[Planted], index: DatasetIndex) -> None:
    bad = {error.stem for error in planted}
    ranked = sorted(worst, key=lambda image: -worst[image])[: len(bad)]
    share = sum(index.path(image).stem in bad for image in ranked) / len(bad)
    print(f"{name:>10}{'pictures':>14}: {len(bad):>5} of {len(index)} have one, in the first {len(bad)} {share:.2f}")


def ours(evidence: EvidenceSink, index: DatasetIndex) -> list[Claim]:
    claims: list[Claim] = []
    for s in suspects(evidence.evidence(), index):
        box = s.suggested_box if s.kind is Suspicion.MISSING else s.box
        claims.append((s.score, NAMES[s.kind], s.image, np.array(box)))
    return claims


def cleanlabs(found: dict[int, Detections], index: DatasetIndex) -> tuple[list[Claim], dict[int, float]]:
    """What cleanlab's scores say of boxes, and of pictures: the lower, the worse."""
    from cleanlab.object_detection import rank

    labels, predictions = [], []
    for i in range(len(index)):
        classes, boxes = index.labels(i)
        labels.append({"bboxes": boxes.astype(float), "labels": classes.astype(int)})
        d = found[i]
        rows = np.column_stack((d.boxes_xyxy.numpy(), d.scores.numpy()))
        own = d.classes.numpy()
        predictions.append(np.array([rows[own == c] for c in range(len(index.names))], dtype=object))
    claims: list[Claim] = []
    given = {"labels": labels, "predictions": predictions}
    missing = rank.compute_overlooked_box_scores(**given, high_probability_threshold=CLEANLAB_CONF)
    for i, scores in enumerate(missing):  # one for each prediction, class after class; NaN where it says nothing
        boxes = np.concatenate([np.asarray(part, float).reshape(-1, 5) for part in predictions[i]])
        claims += [(1 - s, "missing", i, b[:4]) for s, b in zip(scores, boxes, strict=True) if np.isfinite(s) and s < 1]
    shifted = rank.compute_badloc_box_scores(**given)
    swapped = rank.compute_swap_box_scores(**given, high_probability_threshold=CLEANLAB_CONF)
    for kind, of_labels in (("shifted", shifted), ("wrong class", swapped)):
        for i, scores in enumerate(of_labels):
            boxes = labels[i]["bboxes"]
            claims += [(1 - s, kind, i, b) for s, b in zip(scores, boxes, strict=True) if np.isfinite(s) and s < 1]
    of_pictures = rank.get_label_quality_scores(labels, predictions)
    return claims, {i: 1 - float(score) for i, score in enumerate(of_pictures)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    world = World()
    with tempfile.TemporaryDirectory() as folder:
        data, planted = planted_copy(args.data, Path(folder), "val", args.share, args.seed)
        index = build_index(load_spec(data), "val")
        model = open_model(args.weights, world)
        evidence, kept = EvidenceSink(index, range(len(index.names))), Kept()
        sinks = [evidence, kept]
        found = measure(model, index, world, model.usable_imgsz(0), Settings(), batch_size=16, workers=0, sinks=sinks)
        print(f"{args.weights} on {args.data}: mAP50 {found.metrics.map50:.3f} against labels with planted errors")
        report("ours", ours(evidence, index), planted, index)
        if find_spec("cleanlab"):
            claims, of_pictures = cleanlabs(kept.found, index)
            report("cleanlab", claims, planted, index)
            pictures("cleanlab's", of_pictures, planted, index)


if __name__ == "__main__":
    main()
