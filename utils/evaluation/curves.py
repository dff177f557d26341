"""Metrics and curves of a validation: precision, recall and F1 over confidence, precision over recall.

Legend: C classes that have objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import RECALLS, Ranking, average_precision, class_precision_steps
from tessera.utils.evaluation.matching import CONFIDENCES
from tessera.utils.thresholds import DEFAULT_CONF, LOWEST_CONF, SMOOTHING
from tessera.utils.types import Metrics


@dataclass(frozen=True)
class Curves:
    """Curves of the classes that have objects.

    Attributes:
        class_ids: int64 (C,).
        precision, recall, f1: float64 (C, 1000), by `CONFIDENCES`, IoU 0.5; precision is 1 above the highest score.
        precision_at_recall: float64 (C, 101), by `RECALLS`, interpolated precision at IoU 0.5; its mean is AP50.
        ap50: float64 (C,).
        best: index into `CONFIDENCES` of the best mean F1, as of `best_step`.
        class_best: int64 (C,), of each class's own; `best` for a class without true positives.
    """

    class_ids: NDArray[np.int64]
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    f1: NDArray[np.float64]
    precision_at_recall: NDArray[np.float64]
    ap50: NDArray[np.float64]
    best: int
    class_best: NDArray[np.int64]


def summarize(
    ranking: Ranking, nc: int, threshold: float | None = None, measured_from: float = 0.0
) -> tuple[Metrics, Curves]:
    """Compute all metrics but losses and speed, for `nc` classes; means are 0 without objects.

    Args:
        threshold: confidence of precision and recall; None = the best, `DEFAULT_CONF` without objects.
        measured_from: confidence above which there are detections.
    """
    ap = average_precision(ranking, np.ones((ranking.n_images, 1), np.float32))[0][..., 0]
    objects_per_class, images_per_class = np.zeros(nc, np.int64), np.zeros(nc, np.int64)
    objects_per_class[ranking.class_ids] = np.diff(ranking.target_offsets)
    images_per_class[ranking.class_ids] = images_of_classes(ranking)
    curves = compute_curves(ranking, measured_from)
    if threshold is None:
        threshold = float(CONFIDENCES[curves.best]) if len(curves.class_ids) else DEFAULT_CONF
    step = round(threshold * (len(CONFIDENCES) - 1))
    precision, recall = curves.precision[:, step], curves.recall[:, step]
    class_confidences = np.full(nc, threshold)
    class_confidences[curves.class_ids] = CONFIDENCES[curves.class_best]
    metrics = Metrics(
        precision=_mean(precision),
        recall=_mean(recall),
        map50=_mean(ap[:, 0]),
        map=_mean(ap),
        class_ids=ranking.class_ids,
        per_class=np.stack((precision, recall, ap[:, 0], ap.mean(1)), 1),
        images_per_class=images_per_class,
        objects_per_class=objects_per_class,
        images=ranking.n_images,
        objects=len(ranking.target_images),
        confidence=threshold,
        class_confidences=class_confidences,
    )
    return metrics, curves


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0


def images_of_classes(ranking: Ranking) -> NDArray[np.int64]:
    """Count the images that have an object of each class, (C,)."""
    objects = np.diff(ranking.target_offsets)
    pairs = np.unique(np.arange(len(objects)).repeat(objects) * ranking.n_images + ranking.target_images)
    return np.bincount(pairs // max(ranking.n_images, 1), minlength=len(objects))


def compute_curves(ranking: Ranking, measured_from: float) -> Curves:
    n = len(ranking.class_ids)
    objects = np.diff(ranking.target_offsets)
    precision, recall, f1 = (np.zeros((n, len(CONFIDENCES))) for _ in range(3))
    precision_at_recall = np.zeros((n, len(RECALLS)))
    steps = class_precision_steps(ranking, np.ones((ranking.n_images, 1), np.float32))
    for c, (listed, found, thresholds) in enumerate(zip(ranking.above, ranking.correct_above, steps, strict=True)):
        if listed[0] == 0:
            continue
        precision[c] = np.where(listed > 0, found / np.maximum(listed, 1), 1.0)
        recall[c] = found / objects[c]
        f1[c] = 2 * precision[c] * recall[c] / np.maximum(precision[c] + recall[c], 1e-16)
        envelope, gained = next(thresholds)
        sampled = np.repeat(envelope[:, 0], gained[:, 0])
        precision_at_recall[c, : len(sampled)] = sampled
    best = best_step(f1.mean(0), measured_from) if n else 0
    class_best = np.array([best_step(own, measured_from) if own.any() else best for own in f1], np.int64)
    ap50 = precision_at_recall.mean(1)
    return Curves(ranking.class_ids, precision, recall, f1, precision_at_recall, ap50, best, class_best)


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
