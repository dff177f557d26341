"""Errors at the confidence that is best, which is known once all images are seen.

So every rank keeps its matches, and of the false detections of each kind the most confident ones with their boxes. Then
it counts, and sends rank 0 counts, what became of each object, and its worst errors: a bounded number.

Legend: N images, M objects, E errors, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.confusion import ConfusionMatrix, PairCounts
from tessera.utils.evaluation.matches import Matches
from tessera.utils.evaluation.matching import FALSE_KINDS, ImageMatches, Kind, to_host
from tessera.utils.types import DatasetIndex, Detections

MOST_ERRORS = 1000  # of each kind, that are kept one by one
_SCALE = 2.0**30  # of sums, which must not depend on their order
KINDS = (Kind.CORRECT, *FALSE_KINDS)  # of detections that count


class ErrorRows(NamedTuple):
    """Errors one by one.

    Attributes:
        kinds: uint8 (E,), `Kind`.
        sizes: float32 (E,), how wrong the confidence is: that of a false detection; what that of a missed object lacks
            to 1.
        images: int64 (E,), dataset indices.
        places: int32 (E,), among the detections of the image by descending score; of a missed object, its row.
        classes: int32 (E,), of the detection, or of the missed object.
        objects: int32 (E,), row of the object that it is about among those of the image; -1 without one.
        boxes_xyxy: float32 (E, 4), pixels of the original image.
    """

    kinds: NDArray[np.uint8]
    sizes: NDArray[np.float32]
    images: NDArray[np.int64]
    places: NDArray[np.int32]
    classes: NDArray[np.int32]
    objects: NDArray[np.int32]
    boxes_xyxy: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[ErrorRows]) -> ErrorRows:
        """All rows of the parts."""
        return cls._make(np.concatenate(column) for column in zip(_NO_ROWS, *parts, strict=True))

    def at(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> ErrorRows:
        """Those of `rows`, in that order."""
        return ErrorRows._make(column[rows] for column in self)

    def worst(self) -> ErrorRows:
        """At most `MOST_ERRORS` of each kind, by kind: most wrong first, then largest, then in the order of images."""
        areas = (self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2]).prod(1)
        order = np.lexsort((self.places, self.images, -areas, -self.sizes, self.kinds))
        kinds = self.kinds[order]
        return self.at(order[np.arange(len(order)) - np.searchsorted(kinds, kinds) < MOST_ERRORS])


_NO_ROWS = ErrorRows(
    np.zeros(0, np.uint8),
    np.zeros(0, np.float32),
    np.zeros(0, np.int64),
    np.zeros(0, np.int32),
    np.zeros(0, np.int32),
    np.zeros(0, np.int32),
    np.zeros((0, 4), np.float32),
)


class WorstFinds:
    """The most confident false detections of the images so far, at most `MOST_ERRORS` of each kind."""

    def __init__(self) -> None:
        self._rows = _NO_ROWS
        self._waiting: list[ErrorRows] = []
        self._count = 0
        self._least = np.zeros(len(Kind), np.float32)  # from this score on, by kind
        self._least[[Kind.CORRECT, Kind.IGNORED]] = np.inf

    def add(self, image: int, matches: ImageMatches, detections: Detections) -> None:
        """Keep those of an image that may be among them."""
        places = np.flatnonzero(matches.scores >= self._least[matches.kinds])
        if len(places) == 0:
            return
        order = np.argsort(-to_host(detections.scores).astype(np.float32, copy=False), kind="stable")
        boxes_xyxy = to_host(detections.boxes_xyxy).astype(np.float32, copy=False).reshape(-1, 4)
        self._waiting.append(
            ErrorRows(
                matches.kinds[places],
                matches.scores[places],
                np.full(len(places), image, np.int64),
                places.astype(np.int32),
                matches.classes[places],
                matches.objects[places].astype(np.int32),
                boxes_xyxy[order[places]],
            )
        )
        self._count += len(places)
        if self._count > MOST_ERRORS * len(FALSE_KINDS):
            self.rows()

    def rows(self) -> ErrorRows:
        """The worst of each kind."""
        self._rows = ErrorRows.joined([self._rows, *self._waiting]).worst()
        self._waiting.clear()
        self._count = 0
        for kind in FALSE_KINDS:
            sizes = self._rows.sizes[self._rows.kinds == kind]
            if len(sizes) == MOST_ERRORS:
                self._least[kind] = sizes[-1]
        return self._rows


class Tally(NamedTuple):
    """What a rank has counted.

    Attributes:
        images: int64 (N,), dataset indices, ascending.
        finds: int64 (N, 6), detections of each of `KINDS`.
        class_finds: int64 (C, 6), the same by class.
        outcomes: uint8 (M,), `CORRECT`, `WRONG_CLASS`, `BADLY_PLACED` or `MISSED`, in the order of `images`.
        target_counts: int64 (N,), objects.
        sizes: int64 (8,), sums of `ErrorRows.sizes` by kind, of all errors, as multiples of 2**-30.
        pairs: of the confusion matrix.
        worst: errors one by one.
    """

    images: NDArray[np.int64]
    finds: NDArray[np.int64]
    class_finds: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    target_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    pairs: PairCounts
    worst: ErrorRows


def tally(found: Matches, finds: WorstFinds, index: DatasetIndex, confidence: float) -> Tally:
    """Count a rank's errors among the detections that are at least so confident.

    Args:
        found, finds: of the rank's images.
        index: the whole split.
        confidence: one of `CONFIDENCES`.
    """
    nc = background = len(index.names)
    sure = found.scores.astype(np.float64) >= confidence
    counts = sure & (found.kinds != Kind.IGNORED)

    correct, near_misses = found.finders()
    outcomes = _outcomes(found.kinds, sure, correct, near_misses)
    true = np.full(len(found.scores), background)  # class that each detection takes from the objects
    true[sure & (found.kinds == Kind.CORRECT)] = found.classes[sure & (found.kinds == Kind.CORRECT)]
    confused = outcomes == Kind.WRONG_CLASS
    true[near_misses[confused]] = found.target_classes[confused]
    unfound = found.target_classes[np.isin(outcomes, (Kind.BADLY_PLACED, Kind.MISSED))]
    cells = np.concatenate(
        (
            found.classes[counts].astype(np.int64) * (nc + 1) + true[counts],
            background * (nc + 1) + unfound.astype(np.int64),
        )
    )

    column = np.full(len(Kind), -1)
    column[list(KINDS)] = range(len(KINDS))
    kinds = column[found.kinds[counts]]
    rows = np.repeat(np.arange(len(found.images)), found.detection_counts)[counts]
    shape = len(found.images) * len(KINDS), nc * len(KINDS)
    by_image = np.bincount(rows * len(KINDS) + kinds, minlength=shape[0])
    by_class = np.bincount(found.classes[counts] * len(KINDS) + kinds, minlength=shape[1])
    missed = _missed(found, np.flatnonzero(outcomes == Kind.MISSED), (correct, near_misses), index)
    worst = finds.rows()
    false = counts & (found.kinds != Kind.CORRECT)
    return Tally(
        found.images,
        by_image.reshape(-1, len(KINDS)),
        by_class.reshape(nc, len(KINDS)),
        outcomes,
        found.target_counts,
        _sums(found.kinds[false], found.scores[false]) + _sums(missed.kinds, missed.sizes),
        PairCounts.of(cells),
        ErrorRows.joined([worst.at(worst.sizes.astype(np.float64) >= confidence), missed.worst()]),
    )


def _outcomes(
    kinds: NDArray[np.uint8], sure: NDArray[np.bool_], correct: NDArray[np.int64], near_misses: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """What became of each object (M,), from `Matches.finders` and from which detections are sure enough."""
    kinds, sure = np.append(kinds, np.uint8(Kind.MISSED)), np.append(sure, False)  # row -1 is no detection
    outcomes = np.where(sure[near_misses], kinds[near_misses], np.uint8(Kind.MISSED))
    return np.where(sure[correct], np.uint8(Kind.CORRECT), outcomes)


def _missed(
    found: Matches,
    objects: NDArray[np.int64],
    finders: tuple[NDArray[np.int64], NDArray[np.int64]],
    index: DatasetIndex,
) -> ErrorRows:
    """The missed `objects`, as rows of all; those that are found, but less confidently, count for less."""
    images = np.repeat(np.arange(len(found.images)), found.target_counts)[objects]
    rows = objects - (np.cumsum(found.target_counts) - found.target_counts)[images]
    scores = np.append(found.scores, np.float32(0))  # of row -1
    correct, near_misses = finders
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


def _sums(kinds: NDArray[np.uint8], sizes: NDArray[np.float32]) -> NDArray[np.int64]:
    """See `Tally.sizes`."""
    sums = np.zeros(len(Kind), np.int64)
    np.add.at(sums, kinds, np.rint(sizes * _SCALE).astype(np.int64))
    return sums


@dataclass(frozen=True)
class Errors:
    """What a validation got wrong, of all ranks; on rank 0 alone, and of no image on the others.

    Attributes:
        confidence: detections below it do not count.
        images: int64 (N,), dataset indices of the images, ascending.
        finds: int64 (N, 6), detections of each of `KINDS`.
        class_finds: int64 (C, 6), the same by class.
        outcomes: uint8 (M,), what became of each object, `CORRECT`, `WRONG_CLASS`, `BADLY_PLACED` or `MISSED`.
        offsets: int64 (N + 1,), where in it the objects of each image start.
        sizes: float64 (8,), sums of `ErrorRows.sizes` by kind, of all errors.
        confusion: which class is taken for which.
        worst: at most `MOST_ERRORS` of each kind.
    """

    confidence: float
    images: NDArray[np.int64]
    finds: NDArray[np.int64]
    class_finds: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.float64]
    confusion: ConfusionMatrix
    worst: ErrorRows

    @classmethod
    def joined(cls, confidence: float, nc: int, tallies: Sequence[Tally]) -> Errors:
        """Of the images of all ranks."""
        none = np.zeros(0, np.int64)
        images = np.concatenate([none, *(part.images for part in tallies)])
        order = np.argsort(images)
        counts = np.concatenate([none, *(part.target_counts for part in tallies)])
        of_objects = np.argsort(np.repeat(images, counts), kind="stable")
        finds = np.concatenate([np.zeros((0, len(KINDS)), np.int64), *(part.finds for part in tallies)])
        outcomes = np.concatenate([np.zeros(0, np.uint8), *(part.outcomes for part in tallies)])
        return cls(
            confidence,
            images[order],
            finds[order],
            sum((part.class_finds for part in tallies), np.zeros((nc, len(KINDS)), np.int64)),
            outcomes[of_objects],
            np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[order]))),
            sum((part.sizes for part in tallies), np.zeros(len(Kind), np.int64)) / _SCALE,
            ConfusionMatrix.joined(nc, [part.pairs for part in tallies]),
            ErrorRows.joined([part.worst for part in tallies]).worst(),
        )

    def counts(self) -> dict[Kind, int]:
        """Detections of each of `KINDS`, and missed objects."""
        found = dict(zip(KINDS, self.finds.sum(0).tolist(), strict=True))
        return {**found, Kind.MISSED: int((self.outcomes == Kind.MISSED).sum())}
