"""Candidate label errors, and counts of detector-label agreement: of each rank, bounded in number, then joined.

How far a detector can be trusted is known only after all images. So each rank keeps candidates and counts.

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
SIZES = (0.05, 0.15)  # edges of three sizes: side of a label as a fraction of the image's


class LabelErrorKind(IntEnum):
    """Kind of a label error."""

    MISSING = 0  # a detection that no label covers
    SPURIOUS = 1  # a label that no detection supports
    SHIFTED = 2  # a label beside the detection of its class
    WRONG_CLASS = 3  # a label below a detection of another class
    DUPLICATE = 4  # a second label of an object


Rows = NDArray[np.void]  # (R,) of ROW: candidate label errors
ROW = np.dtype(
    [
        ("kind", np.uint8),  # `LabelErrorKind`
        ("image", np.int64),  # dataset index
        ("object", np.int32),  # row of the label among those of the image; -1 of a missing one
        ("other", np.int32),  # the label that a duplicate repeats; else -1
        ("class", np.int32),  # of the detection; of a spurious or duplicate label its own
        # Of the detection; of a spurious label that of the best detection about it, else 0.
        ("confidence", np.float32),
        ("support", np.float32),  # confidence of the best detection that agrees with the label; 0 without one
        ("iou", np.float32),  # of label and detection, or of two labels; 0 where there are not two
        ("near", np.bool_),  # whether the detection reaches a label that the row is not about
        ("box_xyxy", np.float32, 4),  # of the detection, or of the label; pixels of the original image
    ]
)


def most_likely(rows: Rows) -> Rows:
    """Return at most `MOST` rows of each kind, the most likely ones by detection confidence."""
    first = np.select(
        [rows["kind"] == LabelErrorKind.SPURIOUS, rows["kind"] == LabelErrorKind.DUPLICATE],
        [1 - rows["confidence"], rows["iou"]],
        rows["confidence"],
    )
    rows = rows[np.lexsort((*rows["box_xyxy"].T, rows["object"], rows["image"], -first, rows["kind"]))]
    return rows[np.arange(len(rows)) - np.searchsorted(rows["kind"], rows["kind"]) < MOST]


class Counts(NamedTuple):
    """Counts of how well detector and labels agree.

    Attributes:
        detections, correct: (2, C, BINS), by whether they reach a label that is not theirs, class and confidence;
            and the true positives of them at IoU 0.5.
        supports: (C, 3, len(SUPPORTS) + 1), labels by class, size and confidence of the best detection there.
        overlaps: (C, BINS), labels by class and IoU with the best detection of their class.
    """

    detections: NDArray[np.int64]
    correct: NDArray[np.int64]
    supports: NDArray[np.int64]
    overlaps: NDArray[np.int64]

    @classmethod
    def none(cls, nc: int) -> Counts:
        """Return zero counts of `nc` classes."""
        shapes = (2, nc, BINS), (2, nc, BINS), (nc, len(SIZES) + 1, len(SUPPORTS) + 1), (nc, BINS)
        return cls._make(np.zeros(shape, np.int64) for shape in shapes)


class Evidence(NamedTuple):
    """Candidates and counts of some images."""

    rows: Rows
    counts: Counts

    @classmethod
    def joined(cls, nc: int, parts: Sequence[Evidence]) -> Evidence:
        """Join the evidence of all parts; the result does not depend on how images are divided."""
        counts = Counts._make(
            sum(tables) for tables in zip(Counts.none(nc), *(part.counts for part in parts), strict=True)
        )
        return cls(most_likely(np.concatenate([np.zeros(0, ROW), *(part.rows for part in parts)])), counts)


def bins_of(values: NDArray[np.floating] | np.floating) -> NDArray[np.int64]:
    """Return the bin of each confidence or IoU."""
    return np.minimum(np.asarray(values) * BINS, BINS - 1).astype(np.int64)


def steps_of(supports: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bin of each support, 0 of none."""
    return np.searchsorted(SUPPORTS, supports, side="right")


def sizes_of(boxes_xyxy: NDArray[np.float32], sizes_hw: NDArray[np.int32] | tuple[int, ...]) -> NDArray[np.int64]:
    """Return 0, 1 or 2 for small, medium or large, by the root of the area relative to the image."""
    area = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).clip(0).prod(1)
    return np.searchsorted(SIZES, np.sqrt(area / np.prod(np.asarray(sizes_hw, np.float64), -1)), side="right")
