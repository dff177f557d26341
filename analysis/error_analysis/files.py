"""`errors.jsonl` and `images.csv` of a validation, and the console table of errors.

The cost of an error is its part of the mAP50 that fixing all errors of its kind would gain, in proportion to how wrong
its confidence is. Costs compare across kinds; those of a kind add up to its gain.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.analysis.error_analysis.tide_gains import ERROR_KINDS
from tessera.data.source.scan import ImageLabels
from tessera.utils.evaluation.error_counts import KINDS, Errors
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, pairwise_iou
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import called
from tessera.utils.text import harmless_cell, plural, strict_json
from tessera.utils.thresholds import DEFAULT_CONF, LOWEST_CONF
from tessera.utils.types import DatasetIndex

NAMES = {kind: kind.name.lower().replace("_", " ") for kind in Kind}
_COLUMNS = ("image", "objects", "detections", "correct", *(NAMES[kind] for kind in ERROR_KINDS), "precision", "recall")
EXPLAINED = {
    Kind.WRONG_CLASS: "on an object of another class",
    Kind.LOCALIZATION: "near an object of its class, IoU below 0.5",
    Kind.BOTH: "near an object of another class",
    Kind.DUPLICATE: "of an object that is detected already",
    Kind.BACKGROUND: "where nothing is labelled",
    Kind.MISSED: "objects without a detection on or near them",
}
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ErrorItem:
    """An error of a validation.

    Attributes:
        cost: mAP50.
        image, object: dataset index, and row of the object among those of the image; -1 without one.
        predicted: class of the detection; None for a missed object.
        true: class of the object that the error is about, or None.
        score: of the detection; for a missed object, the highest of a detection about it below the confidence, else 0.
        iou: of the two boxes; None unless there are two.
        box, true_box: of the detection and of the object, xyxy pixels of the original image.
    """

    cost: float
    kind: Kind
    image: int
    predicted: int | None
    true: int | None
    score: float
    iou: float | None
    box: Box | None
    true_box: Box | None
    object: int


def error_items(errors: Errors, gains: Mapping[Kind, float], index: DatasetIndex) -> list[ErrorItem]:
    """Return at most `MOST_ERRORS` errors of each kind, sorted by cost, image and score."""
    rows = errors.worst
    rates = np.zeros(len(Kind))
    for kind, gain in gains.items():
        rates[kind] = gain / max(errors.sizes[kind], 1e-9)
    costs = rates[rows.kinds] * rows.sizes
    order = np.lexsort((rows.places, rows.kinds, -rows.sizes, rows.images, -costs))
    items = []
    for row in order.tolist():
        kind, image, own = Kind(rows.kinds[row]), int(rows.images[row]), int(rows.objects[row])
        classes, boxes = index.labels(image)
        box = None if kind == Kind.MISSED else rows.boxes_xyxy[row]
        true_box = boxes[own] if own >= 0 else None
        iou = None
        if box is not None and true_box is not None:
            iou = float(pairwise_iou(box[None], true_box[None])[0, 0])
        items.append(
            ErrorItem(
                cost=float(costs[row]),
                kind=kind,
                image=image,
                predicted=None if box is None else int(rows.classes[row]),
                true=int(classes[own]) if own >= 0 else None,
                score=float(1 - rows.sizes[row] if kind == Kind.MISSED else rows.sizes[row]),
                iou=iou,
                box=None if box is None else tuple(box.tolist()),
                true_box=None if true_box is None else tuple(true_box.tolist()),
                object=own,
            )
        )
    return items


def write_errors(
    target: Path, items: Sequence[ErrorItem], index: DatasetIndex, labels: Mapping[int, ImageLabels]
) -> None:
    """Write one JSON line per error, atomically."""
    with atomic_write(target) as file:
        for item in items:
            file.write(f"{strict_json(_row(item, index, labels.get(item.image)))}\n".encode())


def _row(item: ErrorItem, index: DatasetIndex, labels: ImageLabels | None) -> dict[str, object]:
    line, own = labels.place(item.object) if labels else (None, None)
    return {
        "cost": float(f"{item.cost:.6g}"),
        "kind": NAMES[item.kind],
        "image": str(index.path(item.image)),
        "predicted": None if item.predicted is None else index.names[item.predicted],
        "true": None if item.true is None else index.names[item.true],
        "score": round(item.score, 6),
        "iou": None if item.iou is None else round(item.iou, 4),
        "box": None if item.box is None else [round(side, 2) for side in item.box],
        "true_box": None if item.true_box is None else [round(side, 2) for side in item.true_box],
        "label": labels.file if labels else None,
        "line": line,
        "id": own,
    }


def write_images(target: Path, errors: Errors, index: DatasetIndex) -> None:
    """Write one row of counts per image, atomically."""
    with atomic_write(target) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.writer(text)
        writer.writerow((*_COLUMNS, "f1"))
        writer.writerows(_image_rows(errors, index))
        text.detach()  # flushes, and leaves closing to the caller


def _image_rows(errors: Errors, index: DatasetIndex) -> Iterator[list[object]]:
    objects = np.diff(errors.offsets)
    missed_before = np.concatenate(([0], np.cumsum(errors.outcomes == Kind.MISSED)))
    missed = np.diff(missed_before[errors.offsets])
    columns = errors.images.tolist(), objects.tolist(), errors.image_kind_counts.tolist(), missed.tolist()
    for image, count, kinds, unseen in zip(*columns, strict=True):
        correct, detections = kinds[KINDS.index(Kind.CORRECT)], sum(kinds)
        ratios = (correct, detections), (correct, count), (2 * correct, detections + count)
        metrics = [f"{part / whole:.4f}" if whole else "" for part, whole in ratios]
        false = [kinds[KINDS.index(kind)] for kind in FALSE_KINDS]
        yield [harmless_cell(str(index.path(image))), count, detections, correct, *false, unseen, *metrics]


def explained(kind: Kind, errors: Errors, max_det: int) -> str:
    """Explain a kind of error; `max_det` detections of an image are evaluated."""
    beyond = int((np.diff(errors.offsets) - max_det).clip(0).sum()) if kind == Kind.MISSED else 0
    return EXPLAINED[kind] + f"; {beyond:,} exceed the {max_det} detections of an image" * bool(beyond)


def error_table(errors: Errors, gains: Mapping[Kind, float], max_det: int, *, is_best: bool) -> list[str]:
    """Return console lines: count of each kind of error, and the mAP50 gained without it.

    `is_best`: the confidence is that of the best F1.
    """
    counts = errors.counts()
    detected = f"{counts[Kind.CORRECT]:,} of {len(errors.outcomes):,} objects detected{' at the best F1' * is_best}"
    lines = [
        f"At confidence {errors.confidence:.3f}: {detected}. Error analysis (count at it, mAP50 gain over all "
        "confidences if fixed):"
    ]
    for kind in sorted(ERROR_KINDS, key=lambda kind: -gains[kind]):
        lines.append(f"{NAMES[kind]:>22}{counts[kind]:>11,}{gains[kind]:>+11.3f}   {explained(kind, errors, max_det)}")
    if is_best and errors.confidence < LOWEST_CONF:
        lines.append(
            f"Scores are low: no object is detected at confidence {LOWEST_CONF:g} or above. With these weights "
            f"{called('detect.py')} uses {DEFAULT_CONF:g} unless --conf-thres is given."
        )
    return lines


def background_line(errors: Errors) -> str:
    """Return a console line on false positives in images without objects; "" without such images."""
    images, alarmed, false = errors.on_background()
    if not images:
        return ""
    return (
        f"Images without objects: {plural(false, 'false positive')} at confidence {errors.confidence:.3f}, in "
        f"{alarmed:,} of {plural(images, 'image')}."
    )
