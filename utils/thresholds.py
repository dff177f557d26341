"""Thresholds of detections: what detection takes of those in weights, and the number that a validation counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_DET = 300  # detections of an image that a validation counts, the most confident ones
MOST_DET = 30_000  # largest --max-det
DEFAULT_CONF = 0.25  # as YOLOv5's, for weights without a usable best confidence
SMOOTHING = 0.1  # width of the box filter over a confidence curve, as a fraction of the axis
LOWEST_CONF = SMOOTHING / 2  # lower confidences are too close to 0 for the filter, and to the noise of any detector


class Threshold(NamedTuple):
    """A given confidence threshold, and its origin in words, such as "--conf-thres"."""

    confidence: float
    origin: str


def detection_threshold(best: float | None) -> float:
    """Return the threshold for detection; `best` is the confidence of the best F1, None = unknown.

    Weights of earlier versions store 0 for a plateau that begins there.
    """
    return DEFAULT_CONF if best is None or best < LOWEST_CONF else best


def class_thresholds(best: Sequence[float], overall: float) -> tuple[float, ...]:
    """Return the threshold of each class, `overall` for those whose best F1 is too low."""
    return tuple(overall if one < LOWEST_CONF else one for one in best)
