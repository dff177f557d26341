"""Matches of many images, collected on every rank and joined in dataset order.

Legend: N images, D detections, M objects, T = 10 IoU thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import IOU_THRESHOLDS, ImageMatches, Kind

CONFIDENCES: NDArray[np.float64] = np.linspace(0.0, 1.0, 1000)  # the axis of the curves


class Matches(NamedTuple):
    """Objects and detections of images in dataset order; the detections of an image by descending score.

    Attributes:
        images: int64 (N,), dataset indices, ascending.
        target_counts, detection_counts: int64 (N,), objects and detections of each.
        target_classes: int32 (M,).
        scores: float32 (D,), classes: int32 (D,).
        correct: uint16 (D,), bit t: a true positive at threshold t.
        ignored: uint16 (D,), bit t: none at threshold t, and covered by an ignored region.
        kinds: uint8 (D,), `Kind`.
        objects: signed (D,), the object concerned, as in `ImageMatches`: its row among those of its image.
        boxes_xyxy: float32 (D, 4), pixels of the original image; (D, 0) without boxes.
    """

    images: NDArray[np.int64]
    target_counts: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    target_classes: NDArray[np.int32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    correct: NDArray[np.uint16]
    ignored: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    objects: NDArray[np.signedinteger]
    boxes_xyxy: NDArray[np.float32]

    @classmethod
    def of_image(cls, image: int, found: ImageMatches, *, keep_boxes: bool = True) -> Matches:
        """Return the matches of one image; `image` is its dataset index."""
        ignored = ~found.correct & (np.arange(len(IOU_THRESHOLDS)) < found.in_regions[:, None])
        return cls(
            np.array([image], np.int64),
            np.array([len(found.target_classes)], np.int64),
            np.array([len(found.scores)], np.int64),
            found.target_classes,
            found.scores,
            found.classes,
            _as_bits(found.correct),
            _as_bits(ignored),
            found.kinds,
            found.objects,
            found.boxes_xyxy if keep_boxes else np.zeros((len(found.scores), 0), np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[Matches]) -> Matches:
        """Join the matches of all parts, in any order. Each image must be in one part only."""
        parts = [part for part in parts if len(part.images)] or [_NOTHING]
        every = cls._make(np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(every.images, kind="stable")
        images = every.images[order]
        assert np.all(np.diff(images) > 0), "an image was evaluated twice: shards of a validation must not overlap"
        targets = np.argsort(np.repeat(every.images, every.target_counts), kind="stable")
        rows = np.argsort(np.repeat(every.images, every.detection_counts), kind="stable")
        counts = every.target_counts[order], every.detection_counts[order]
        return cls._make((images, *counts, every.target_classes[targets], *(column[rows] for column in every[4:])))

    def object_matches(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each object (M,) the row of its true positive and of its near miss, -1 for none.

        The near miss is the most confident detection about the object whose class or location is wrong.
        """
        starts = np.cumsum(self.target_counts) - self.target_counts
        about = np.flatnonzero(self.kinds <= Kind.LOCALIZATION)
        rows = np.repeat(starts, self.detection_counts)[about] + self.objects[about]
        is_correct = self.kinds[about] == Kind.CORRECT
        correct, near_misses = np.full(len(self.target_classes), -1), np.full(len(self.target_classes), -1)
        correct[rows[is_correct]] = about[is_correct]
        # An image's detections are sorted: the first one about an object is the most confident.
        missed, first = np.unique(rows[~is_correct], return_index=True)
        near_misses[missed] = about[~is_correct][first]
        return correct, near_misses


_DTYPES = ("i8", "i8", "i8", "i4", "f4", "i4", "u2", "u2", "u1", "i1")
_NOTHING = Matches._make([*(np.zeros(0, dtype) for dtype in _DTYPES), np.zeros((0, 4), np.float32)])


def _as_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Pack (D, T) into uint16 (D,), bit t from column t."""
    return flags @ (1 << np.arange(flags.shape[1], dtype=np.uint16))
