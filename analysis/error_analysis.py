"""Error analysis of a validation: mAP50 gained without each kind of error, and the worst errors.

The gains are TIDE's (Bolya et al. 2020). Each kind is fixed alone. For a wrong class or a bad location, the most
confident detection about an object without a true positive becomes correct, and the others are removed. Other false
positives are removed; missed objects are removed from the ground truth. AP is COCO's: recalls are compared as by
pycocotools, classes without objects are excluded.

The cost of an error is its part of its kind's gain, in proportion to how wrong its confidence is. Costs compare across
kinds; those of a kind add up to its gain.

Legend: C classes that have objects, E candidates of a class.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.error_counts import KINDS, Errors
from tessera.data.source.scan import ClassNames, read_objects, to_corners
from tessera.data.source.split_files import Listing, list_images
from tessera.utils.evaluation.average_precision import RECALLS, precision_steps
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, Matches, pairwise_iou
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import called
from tessera.utils.text import harmless_cell, plural, strict_json
from tessera.utils.thresholds import DEFAULT_CONF, LOWEST_CONF
from tessera.utils.types import CocoId, DatasetIndex, DatasetSpec

ERROR_KINDS = (*FALSE_KINDS, Kind.MISSED)
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


def error_gains(matches: Matches) -> dict[Kind, float]:
    """Return the mAP50 gained without the errors of each of `ERROR_KINDS`; 0 without objects."""
    class_ids, target_rows = np.unique(matches.target_classes, return_inverse=True)
    found = np.flatnonzero(np.isin(matches.classes, class_ids))
    correct, near_misses = matches.object_matches()
    missed = np.flatnonzero((correct < 0) & (near_misses >= 0))
    # A near miss is listed a second time, in the class of its object.
    rows = np.concatenate((found, near_misses[missed]))
    classes = np.concatenate((np.searchsorted(class_ids, matches.classes[found]), target_rows[missed]))
    images = np.arange(len(matches.images)).repeat(matches.detection_counts)[rows]
    order = np.lexsort((images, -matches.scores[rows], classes))
    kinds, is_near_miss = matches.kinds[rows[order]], order >= len(found)
    starts = np.searchsorted(classes[order], np.arange(len(class_ids) + 1))
    gains = np.zeros(len(ERROR_KINDS))
    for objects, start, end in zip(np.bincount(target_rows).tolist(), starts[:-1], starts[1:], strict=True):
        gains += _class_gains(kinds[start:end], is_near_miss[start:end], objects)
    return dict(zip(ERROR_KINDS, (gains / max(len(class_ids), 1)).tolist(), strict=True))


def _class_gains(kinds: NDArray[np.uint8], is_near_miss: NDArray[np.bool_], objects: int) -> NDArray[np.float64]:
    """Return the AP50 that a class gains without each kind of error.

    Takes the kinds of the detections of the class and of its near misses (D,), as ranked. A candidate is a true
    positive, or a near miss.
    """
    at = np.flatnonzero(is_near_miss | (kinds == Kind.CORRECT))
    false = [np.cumsum((kinds == kind) & ~is_near_miss)[at] for kind in FALSE_KINDS]
    candidates, false_positives_above = kinds[at], np.stack(false, 1)

    def ap(fixed: Kind, removed: Sequence[Kind | None], counts: Sequence[int]) -> list[float]:
        """Return one AP per removed kind and object count, with candidates of kind `fixed` as true positives."""
        right = (candidates == Kind.CORRECT) | (candidates == fixed)
        stays = np.array([[kind != other for other in removed] for kind in FALSE_KINDS])
        correct = np.cumsum(right)[right, None].astype(np.float64)
        listed = correct + false_positives_above[right] @ stays
        envelope, gained = precision_steps(np.broadcast_to(correct, listed.shape), listed, np.array(counts, np.float32))
        means: list[float] = (np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)).tolist()
        return means

    fixed = [ap(kind, [kind], [objects])[0] for kind in FALSE_KINDS[:2]]
    counts = [*[objects] * 4, len(candidates)]  # an object that is not missed has a candidate
    as_is, *others = ap(Kind.CORRECT, [None, *FALSE_KINDS[2:], None], counts)
    return np.array([*fixed, *others]) - as_is


@dataclass(frozen=True)
class ErrorItem:
    """An error of a validation; boxes are xyxy pixels of the original image."""

    cost: float  # mAP50
    kind: Kind
    image: int  # dataset index
    predicted: int | None  # class of the detection; None for a missed object
    true: int | None  # class of the object that the error is about
    score: float  # of the detection; for a missed object, the highest below the confidence about it, else 0
    iou: float | None  # of the two boxes
    box: Box | None  # of the detection
    true_box: Box | None  # of the object
    object: int  # row of the object among those of the image; -1 without one


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
        predicted, true = None if box is None else int(rows.classes[row]), int(classes[own]) if own >= 0 else None
        score = float(1 - rows.sizes[row] if kind == Kind.MISSED else rows.sizes[row])
        found, labelled = (None if one is None else tuple(one.tolist()) for one in (box, true_box))
        items.append(
            ErrorItem(float(costs[row]), kind, image, predicted, true, score, iou, found, labelled, object=own)
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
    predicted, true = (None if c is None else index.names[c] for c in (item.predicted, item.true))
    box, true_box = (None if b is None else [round(side, 2) for side in b] for b in (item.box, item.true_box))
    return {
        "cost": float(f"{item.cost:.6g}"),
        "kind": NAMES[item.kind],
        "image": str(index.path(item.image)),
        "predicted": predicted,
        "true": true,
        "score": round(item.score, 6),
        "iou": None if item.iou is None else round(item.iou, 4),
        "box": box,
        "true_box": true_box,
        "label": labels.file if labels else None,
        "line": line,
        "id": own,
    }


def write_images(target: Path, errors: Errors, index: DatasetIndex) -> None:
    """Write one row of counts per image, atomically."""
    missed_before = np.concatenate(([0], np.cumsum(errors.outcomes == Kind.MISSED)))
    missed, objects = np.diff(missed_before[errors.offsets]), np.diff(errors.offsets)
    columns = errors.images.tolist(), objects.tolist(), errors.image_kind_counts.tolist(), missed.tolist()
    with atomic_write(target) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.writer(text)
        writer.writerow((*_COLUMNS, "f1"))
        for image, count, kinds, unseen in zip(*columns, strict=True):
            correct, detections = kinds[KINDS.index(Kind.CORRECT)], sum(kinds)
            ratios = (correct, detections), (correct, count), (2 * correct, detections + count)
            metrics = [f"{part / whole:.4f}" if whole else "" for part, whole in ratios]
            false = [kinds[KINDS.index(kind)] for kind in FALSE_KINDS]
            path = harmless_cell(str(index.path(image)))
            writer.writerow([path, count, detections, correct, *false, unseen, *metrics])
        text.detach()  # flushes, and leaves closing to the caller


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


class ImageLabels(NamedTuple):
    """Location of the labels of an image."""

    file: str  # text, XML or JSON file, which may not exist
    lines: Sequence[int] = ()  # line of each object; () for a COCO file, or if the file has changed
    ids: Sequence[CocoId | None] = ()  # annotation id of each object in a COCO file

    def place(self, row: int) -> tuple[int | None, CocoId | None]:
        """Return line and annotation id of an object; None if unknown."""
        line = self.lines[row] if 0 <= row < len(self.lines) else None
        return line, self.ids[row] if 0 <= row < len(self.ids) else None


def locate_labels(
    spec: DatasetSpec, index: DatasetIndex, images: Iterable[int], *, single_cls: bool = False
) -> dict[int, ImageLabels]:
    """Read the labels of these images of the index again; deleted images are omitted."""
    listing, names = list_images(spec, index.split), ClassNames.of(spec, single_cls)
    found = {}
    for image in images:
        path = str(index.path(image))
        place = bisect_left(listing.images, path)
        if place < len(listing.images) and listing.images[place] == path:
            found[image] = _labels_of(listing, place, names, index, image)
    return found


def _labels_of(listing: Listing, place: int, names: ClassNames, index: DatasetIndex, image: int) -> ImageLabels:
    """Return the labels of image `image` of the index, which is image `place` of the listing."""
    height, width = index.sizes_hw[image].tolist()
    parsed = read_objects(listing, place, (height, width), names)
    classes, boxes_xyxy = index.labels(image)
    boxes = to_corners(np.array(parsed.boxes).reshape(-1, 4), np.tile(index.sizes_hw[image], (len(parsed.classes), 1)))
    is_same = len(boxes) == len(classes) and np.array_equal(boxes, boxes_xyxy)
    lines = parsed.lines if is_same else ()
    if place not in listing.coco:
        return ImageLabels(listing.labels[place], lines)
    file, coco_image, _ = listing.coco[place]
    records = dict(coco_image.annotations)
    return ImageLabels(str(file), ids=[_id(records[number]) for number in lines])


def _id(record: dict[str, Any]) -> CocoId | None:
    """Return an annotation's id, which may be missing."""
    own = record.get("id")
    return own if isinstance(own, (int, str)) and not isinstance(own, bool) else None
