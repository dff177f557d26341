"""Thresholds of detections: the best confidence of an F1 curve, what detection takes of those that weights store, and
the number that a validation counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_DET = 300  # detections of an image that a validation counts, the most confident ones
MOST_DET = 30_000  # largest --max-det
DEFAULT_CONF = 0.25  # as YOLOv5's, for weights without a usable best confidence
SMOOTHING = 0.1  # width of the box filter over a confidence curve, as a fraction of the axis
LOWEST_CONF = SMOOTHING / 2  # lower confidences are too close to 0 for the filter, and to the noise of any detector


class Threshold(NamedTuple):
    """A given confidence threshold, and its origin in words, such as "--conf-thres"."""

    confidence: float
    origin: str


def best_step(f1: NDArray[np.float64], measured_from: float = 0.0) -> int:
    """Return the index of the best confidence on an F1 curve (n,), at n confidences from 0 to 1.

    It is the middle of the longest plateau of the highest smoothed F1, as a good detector has no error between its
    weakest true positive and 0. It lies below `LOWEST_CONF` only if F1 is 0 from there on.

    Args:
        measured_from: confidence above which there are detections; the curve says nothing below.
    """
    known, usable = (math.ceil(least * (len(f1) - 1)) for least in (measured_from, max(measured_from, LOWEST_CONF)))
    if not f1.any():
        return max(known, 1)
    start = usable if f1[usable:].any() else max(known, 1)
    smoothed = smooth(f1[start:], round(len(f1) * SMOOTHING) // 2)
    top = np.flatnonzero(smoothed > smoothed.max() - 1e-9)
    plateau = max(np.split(top, np.flatnonzero(np.diff(top) > 1) + 1), key=len)
    return start + int(plateau[len(plateau) // 2])


def smooth(values: NDArray[np.float64], half: int) -> NDArray[np.float64]:
    """Average a curve (n,) over `half` steps to either side, so that no single lucky point decides."""
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def detection_threshold(best: float | None) -> float:
    """Return the threshold for detection; `best` is the confidence of the best F1, None = unknown.

    Weights of earlier versions store 0 for a plateau that begins there.
    """
    return DEFAULT_CONF if best is None or best < LOWEST_CONF else best


def class_thresholds(best: Sequence[float], overall: float) -> tuple[float, ...]:
    """Return the threshold of each class, `overall` for those whose best F1 is too low."""
    return tuple(overall if one < LOWEST_CONF else one for one in best)
