"""What is kept of the pictures: what may be wrong with single labels, and how detector and labels agree otherwise.

Whether a detector is right to disagree is known only once all pictures are seen. So each rank keeps a bounded number of
rows, and counts.

Legend: R rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 20_000  # rows of each kind
BINS = 20  # of confidence and of IoU
SUPPORTS: NDArray[np.float32] = np.array(
    [1e-6, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, *np.arange(0.2, 0.95, 0.1)], np.float32
)  # edges of bins
SIZES = (0.05, 0.15)  # side of a label as a share of the picture's: edges of its three sizes


class Suspicion(IntEnum):
    """What may be wrong with a label."""

    MISSING = 0  # a detection that no label covers
    SPURIOUS = 1  # a label that no detection supports
    SHIFTED = 2  # a label beside the detection of its class
    WRONG_CLASS = 3  # a label below a detection of another class
    DUPLICATE = 4  # a second label of an object


class Rows(NamedTuple):
    """What may be wrong, one by one.

    Attributes:
        kinds: uint8 (R,), `Suspicion`.
        images: int64 (R,), dataset indices.
        objects: int32 (R,), row of the label among those of the image; -1 of a missing one.
        others: int32 (R,), the label that a duplicate repeats; else -1.
        classes: int32 (R,), of the detection; of a spurious or duplicate label its own.
        confidences: float32 (R,), of the detection; of a spurious label that of the best one about it, 0 without one.
        supports: float32 (R,), confidence of the best detection that agrees with the label; 0 without one.
        ious: float32 (R,), of label and detection, or of two labels; 0 where there are not two.
        near: bool (R,), whether the detection reaches a label that the row is not about.
        boxes_xyxy: float32 (R, 4), of the detection, or of the label; pixels of the original image.
    """

    kinds: NDArray[np.uint8]
    images: NDArray[np.int64]
    objects: NDArray[np.int32]
    others: NDArray[np.int32]
    classes: NDArray[np.int32]
    confidences: NDArray[np.float32]
    supports: NDArray[np.float32]
    ious: NDArray[np.float32]
    near: NDArray[np.bool_]
    boxes_xyxy: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of the parts."""
        return cls._make(np.concatenate(column) for column in zip(NO_ROWS, *parts, strict=True))

    def at(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Rows:
        """Those of `rows`, in that order."""
        return Rows._make(column[rows] for column in self)

    def most(self) -> Rows:
        """At most `MOST` of each kind, those that are most likely before anything is known of the detector."""
        first = np.select(
            [self.kinds == Suspicion.SPURIOUS, self.kinds == Suspicion.DUPLICATE],
            [1 - self.confidences, self.ious],
            self.confidences,
        )
        order = np.lexsort((*self.boxes_xyxy.T, self.objects, self.images, -first, self.kinds))
        kinds = self.kinds[order]
        return self.at(order[np.arange(len(order)) - np.searchsorted(kinds, kinds) < MOST])


_NO_INTEGERS, _NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NO_ROWS = Rows(
    np.zeros(0, np.uint8),
    np.zeros(0, np.int64),
    _NO_INTEGERS,
    _NO_INTEGERS,
    _NO_INTEGERS,
    _NO_FLOATS,
    _NO_FLOATS,
    _NO_FLOATS,
    np.zeros(0, np.bool_),
    np.zeros((0, 4), np.float32),
)


class Counts(NamedTuple):
    """How detector and labels agree otherwise.

    Attributes:
        finds, correct: int64 (2, C, BINS), detections by whether they reach a label that is not theirs, class and
            confidence; and those that are correct at IoU 0.5.
        supports: int64 (C, 3, len(SUPPORTS) + 1), labels by class, size, and confidence of what is found there.
        overlaps: int64 (C, BINS), labels by class and IoU with the best detection of their class.
    """

    finds: NDArray[np.int64]
    correct: NDArray[np.int64]
    supports: NDArray[np.int64]
    overlaps: NDArray[np.int64]

    @classmethod
    def none(cls, nc: int) -> Counts:
        """Of no image; `nc` classes."""
        shapes = (2, nc, BINS), (2, nc, BINS), (nc, len(SIZES) + 1, len(SUPPORTS) + 1), (nc, BINS)
        return cls._make(np.zeros(shape, np.int64) for shape in shapes)

    def add(self, other: Counts) -> None:
        """Count these too."""
        for mine, theirs in zip(self, other, strict=True):
            mine += theirs


class Evidence(NamedTuple):
    """Of some images: what may be wrong, and how detector and labels agree otherwise."""

    rows: Rows
    counts: Counts

    @classmethod
    def joined(cls, nc: int, parts: Sequence[Evidence]) -> Evidence:
        """Of the images of all parts; the same however they are divided."""
        counts = Counts.none(nc)
        for part in parts:
            counts.add(part.counts)
        return cls(Rows.joined([part.rows for part in parts]).most(), counts)


def bins_of(shares: NDArray[np.floating] | np.floating) -> NDArray[np.int64]:
    """The bin of each confidence or IoU."""
    return np.minimum(np.asarray(shares) * BINS, BINS - 1).astype(np.int64)


def steps_of(supports: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each support, 0 of none."""
    return np.searchsorted(SUPPORTS, supports, side="right")


def sizes_of(boxes_xyxy: NDArray[np.float32], sizes_hw: NDArray[np.int32] | tuple[int, ...]) -> NDArray[np.int64]:
    """Small, medium or large: 0, 1 or 2, by the root of the area as a share of that of the picture."""
    area = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(0).prod(1)
    return np.searchsorted(SIZES, np.sqrt(area / np.prod(np.asarray(sizes_hw, np.float64), -1)), side="right")
