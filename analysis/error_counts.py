"""Error counts at a confidence: by kind, image and class, with the worst errors.

Legend: N images, M objects, E errors, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, Matches
from tessera.utils.types import DatasetIndex

MOST_ERRORS = 1000  # of each kind, listed one by one
KINDS = (Kind.CORRECT, *FALSE_KINDS)  # of detections that count


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of (predicted class, true class) at IoU 0.5, stored only for pairs that occur.

    A true positive is paired with its object. An object without one is paired with the most confident detection of
    another class on it, unless a more confident one of its own class is a localization error. Everything else pairs
    with background; ignored detections are not counted. So each object and each detection counts once.

    Attributes:
        nc: number of classes.
        cells: int64 (K,), ascending, predicted · (nc + 1) + true; class nc is background.
        counts: int64 (K,).
    """

    nc: int
    cells: NDArray[np.int64]
    counts: NDArray[np.int64]

    def grouped(self, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return counts (G, G), rows predicted, columns true; `group_of` (nc + 1,) maps classes, background last."""
        groups = int(group_of.max()) + 1
        predicted, true = np.divmod(self.cells, self.nc + 1)
        summed = np.bincount(group_of[predicted] * groups + group_of[true], self.counts, groups**2)
        return summed.astype(np.int64).reshape(groups, groups)

    def confusions(self) -> NDArray[np.int64]:
        """Count how often each class was confused with another, (nc,)."""
        predicted, true = np.divmod(self.cells, self.nc + 1)
        confused = (predicted != true) & (predicted < self.nc) & (true < self.nc)
        both = np.concatenate((predicted[confused], true[confused]))
        return np.bincount(both, np.tile(self.counts[confused], 2), self.nc).astype(np.int64)


class ErrorRows(NamedTuple):
    """Single errors.

    Attributes:
        kinds: uint8 (E,), `Kind`.
        sizes: float32 (E,), how wrong the confidence is: the score of a false positive, 1 - score of a missed object.
        images: int64 (E,), dataset indices.
        places: int32 (E,), rank among the detections of the image by score; for a missed object, its row.
        classes: int32 (E,), of the detection or the missed object.
        objects: int32 (E,), row of the object concerned among those of the image; -1 without one.
        boxes_xyxy: float32 (E, 4), pixels of the original image.
    """

    kinds: NDArray[np.uint8]
    sizes: NDArray[np.float32]
    images: NDArray[np.int64]
    places: NDArray[np.int32]
    classes: NDArray[np.int32]
    objects: NDArray[np.int32]
    boxes_xyxy: NDArray[np.float32]

    def worst(self) -> ErrorRows:
        """Return at most `MOST_ERRORS` of each kind, sorted by kind, size, area and image."""
        areas = (self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2]).prod(1)
        order = np.lexsort((self.places, self.images, -areas, -self.sizes, self.kinds))
        kinds = self.kinds[order]
        rows = order[np.arange(len(order)) - np.searchsorted(kinds, kinds) < MOST_ERRORS]
        return ErrorRows._make(column[rows] for column in self)


@dataclass(frozen=True)
class Errors:
    """Errors of a validation.

    Attributes:
        confidence: threshold of the detections that count.
        images: int64 (N,), dataset indices, ascending.
        image_kind_counts, class_kind_counts: int64 (N, 6) and (C, 6), detections of each of `KINDS`.
        outcomes: uint8 (M,), of each object: `CORRECT`, `WRONG_CLASS`, `LOCALIZATION` or `MISSED`.
        labels_any: bool (N,), images that label a class.
        offsets: int64 (N + 1,), where the objects of each image start in `outcomes`.
        sizes: float64 (8,), sums of `ErrorRows.sizes` by kind, over all errors.
        worst: at most `MOST_ERRORS` of each kind.
    """

    confidence: float
    images: NDArray[np.int64]
    image_kind_counts: NDArray[np.int64]
    class_kind_counts: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    labels_any: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.float64]
    confusion: ConfusionMatrix
    worst: ErrorRows

    def counts(self) -> dict[Kind, int]:
        """Return the number of detections of each of `KINDS`, and of missed objects."""
        found = dict(zip(KINDS, self.image_kind_counts.sum(0).tolist(), strict=True))
        return {**found, Kind.MISSED: int((self.outcomes == Kind.MISSED).sum())}

    def on_background(self) -> tuple[int, int, int]:
        """Count the images of background, those of them that have a false positive, and their false positives."""
        false = self.image_kind_counts[(np.diff(self.offsets) == 0) & self.labels_any].sum(1)
        return len(false), int((false > 0).sum()), int(false.sum())


def count_errors(found: Matches, index: DatasetIndex, confidence: float) -> Errors:
    """Count the errors among the detections with at least this confidence."""
    nc = background = len(index.names)
    sure = found.scores.astype(np.float64) >= confidence
    counts = sure & (found.kinds != Kind.IGNORED)
    is_correct = sure & (found.kinds == Kind.CORRECT)

    correct, near_misses = found.object_matches()
    # Row -1 is no detection.
    known, counted = np.append(found.kinds, np.uint8(Kind.MISSED)), np.append(sure, False)
    outcomes = np.where(counted[near_misses], known[near_misses], np.uint8(Kind.MISSED))
    outcomes = np.where(counted[correct], np.uint8(Kind.CORRECT), outcomes)
    true = np.where(is_correct, found.classes, background)  # true class of each detection
    confused = outcomes == Kind.WRONG_CLASS
    true[near_misses[confused]] = found.target_classes[confused]
    unfound = found.target_classes[np.isin(outcomes, (Kind.LOCALIZATION, Kind.MISSED))].astype(np.int64)
    pairs = found.classes[counts].astype(np.int64) * (nc + 1) + true[counts]
    cells = np.unique(np.concatenate((pairs, background * (nc + 1) + unfound)), return_counts=True)

    column = np.full(len(Kind), -1)
    column[list(KINDS)] = range(len(KINDS))
    kinds = column[found.kinds[counts]]
    rows = np.repeat(np.arange(len(found.images)), found.detection_counts)
    by_image = np.bincount(rows[counts] * len(KINDS) + kinds, minlength=len(found.images) * len(KINDS))
    by_class = np.bincount(found.classes[counts] * len(KINDS) + kinds, minlength=nc * len(KINDS))

    false = np.flatnonzero(counts & ~is_correct)
    places = false - (np.cumsum(found.detection_counts) - found.detection_counts)[rows[false]]
    false_rows = ErrorRows(
        found.kinds[false],
        found.scores[false],
        found.images[rows[false]],
        places.astype(np.int32),
        found.classes[false],
        found.objects[false].astype(np.int32),
        found.boxes_xyxy[false],
    )
    missed = _missed(found, np.flatnonzero(outcomes == Kind.MISSED), (correct, near_misses), index)
    parts: list[tuple[NDArray[Any], ...]] = [false_rows, missed]
    errors = ErrorRows._make(np.concatenate(column) for column in zip(*parts, strict=True))
    return Errors(
        confidence,
        found.images,
        by_image.reshape(-1, len(KINDS)),
        by_class.reshape(nc, len(KINDS)),
        outcomes,
        ~index.labels_nothing()[found.images],
        np.concatenate((np.zeros(1, np.int64), np.cumsum(found.target_counts))),
        np.bincount(errors.kinds, errors.sizes, len(Kind)).astype(np.float64),
        ConfusionMatrix(nc, *cells),
        errors.worst(),
    )


def _missed(
    found: Matches,
    objects: NDArray[np.int64],
    object_matches: tuple[NDArray[np.int64], NDArray[np.int64]],
    index: DatasetIndex,
) -> ErrorRows:
    """Return the rows of the missed `objects`; those detected below the confidence weigh less."""
    images = np.repeat(np.arange(len(found.images)), found.target_counts)[objects]
    rows = objects - (np.cumsum(found.target_counts) - found.target_counts)[images]
    scores = np.append(found.scores, np.float32(0))  # of row -1
    correct, near_misses = object_matches
    images = found.images[images]
    return ErrorRows(
        np.full(len(objects), Kind.MISSED, np.uint8),
        1 - np.maximum(scores[correct[objects]], scores[near_misses[objects]]),
        images,
        rows.astype(np.int32),
        found.target_classes[objects],
        rows.astype(np.int32),
        index.boxes_xyxy[index.box_offsets[images] + rows],
    )
