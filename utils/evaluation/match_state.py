"""Matches of many images: collected on every rank, gathered as flat arrays, merged in the order of the images.

So that the outcome does not depend on ranks and batches.

Legend: N images, D detections, M objects, T = 10 IoU thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from utils.evaluation.matching import IOU_THRESHOLDS, ImageMatches


@dataclass(frozen=True)
class MatchState:
    """Matches of many images as flat arrays: cheap to pickle, gather and resample.

    Attributes:
        images: int64 (N,), dataset indices, ascending.
        detection_counts: int64 (N,), detections of each image.
        correct: bool (D, T), see `ImageMatches`.
        scores: float32 (D,).
        classes: int32 (D,).
        target_counts: int64 (N,), objects of each image.
        target_classes: int32 (M,).
        in_crowds: uint8 (D,).
    """

    images: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    correct: NDArray[np.bool_]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    target_counts: NDArray[np.int64]
    target_classes: NDArray[np.int32]
    in_crowds: NDArray[np.uint8]


class Accumulator:
    """Collects the matches of the images that this rank has seen."""

    def __init__(self) -> None:
        self._images: list[int] = []
        self._matches: list[ImageMatches] = []

    def add(self, image: int, matches: ImageMatches) -> None:
        """Add an image by its index in the dataset; each image once."""
        self._images.append(image)
        self._matches.append(matches)

    def state(self) -> MatchState:
        """Everything added so far, by ascending image."""
        order = np.argsort(np.array(self._images, np.int64), kind="stable")
        matches = [self._matches[i] for i in order]
        return MatchState(
            np.array(self._images, np.int64)[order],
            np.array([len(m.scores) for m in matches], np.int64),
            np.concatenate([np.zeros((0, len(IOU_THRESHOLDS)), np.bool_), *(m.correct for m in matches)]),
            np.concatenate([np.zeros(0, np.float32), *(m.scores for m in matches)]),
            np.concatenate([np.zeros(0, np.int32), *(m.classes for m in matches)]),
            np.array([len(m.target_classes) for m in matches], np.int64),
            np.concatenate([np.zeros(0, np.int32), *(m.target_classes for m in matches)]),
            np.concatenate([np.zeros(0, np.uint8), *(m.in_crowds for m in matches)]),
        )


def merge(states: Sequence[MatchState]) -> MatchState:
    """Join the ranks' states by ascending image, whatever the ranks' order and shares.

    Each image must be in one state only: counted twice, it would falsify every figure.
    """
    images = np.concatenate([s.images for s in states])
    order = np.argsort(images, kind="stable")
    assert len(np.unique(images)) == len(images), (
        "an image was evaluated twice: shards of a validation must not overlap"
    )
    detection_counts = np.concatenate([s.detection_counts for s in states])
    target_counts = np.concatenate([s.target_counts for s in states])
    detections = _rows_of_segments(detection_counts, order)
    targets = _rows_of_segments(target_counts, order)
    return MatchState(
        images[order],
        detection_counts[order],
        np.concatenate([s.correct for s in states])[detections],
        np.concatenate([s.scores for s in states])[detections],
        np.concatenate([s.classes for s in states])[detections],
        target_counts[order],
        np.concatenate([s.target_classes for s in states])[targets],
        np.concatenate([s.in_crowds for s in states])[detections],
    )


def _rows_of_segments(counts: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row numbers that bring consecutive segments of `counts` rows into `order`."""
    starts = np.cumsum(counts) - counts
    moved = counts[order]
    return np.repeat(starts[order] - (np.cumsum(moved) - moved), moved) + np.arange(counts.sum())
