"""Precision, recall and F1 over confidence, precision over recall; and all figures of a validation.

Legend: C classes that have objects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from utils.evaluation.average_precision import RECALLS, Ranking, average_precision, precision_steps, rank
from utils.evaluation.match_state import MatchState
from utils.types import Metrics

CONFIDENCES: NDArray[np.float64] = np.linspace(0.0, 1.0, 1000)
SMOOTHING = 0.1  # width of the box filter over a confidence curve, as a share of the axis


@dataclass(frozen=True)
class Curves:
    """What the plots of a validation show; rows are the classes that have objects.

    Attributes:
        class_ids: int64 (C,).
        confidence: float64 (1000,), the axis of the next three.
        precision, recall, f1: float64 (C, 1000), of the detections at least that confident, at IoU 0.5. Precision is 1
            above a class's highest score.
        recall_axis: float64 (101,).
        precision_at_recall: float64 (C, 101), interpolated precision at IoU 0.5; its mean over the axis is AP50.
        ap50: float64 (C,).
        best: index into `confidence` where the mean smoothed F1 is highest.
    """

    class_ids: NDArray[np.int64]
    confidence: NDArray[np.float64]
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    f1: NDArray[np.float64]
    recall_axis: NDArray[np.float64]
    precision_at_recall: NDArray[np.float64]
    ap50: NDArray[np.float64]
    best: int


def summarize(state: MatchState, nc: int) -> tuple[Metrics, Curves]:
    """Every figure of a validation but losses and speed (`dataclasses.replace` adds those).

    Args:
        state: merged from all ranks.
        nc: number of classes of the dataset.

    Returns:
        Metrics and curves. Without a single object all means are 0.
    """
    ranking = rank(state)
    ap = average_precision(ranking, np.ones((ranking.n_images, 1), np.float32))[0][..., 0]
    image_rows = np.repeat(np.arange(len(state.images)), state.target_counts)
    pairs = np.unique(np.stack((image_rows, state.target_classes.astype(np.int64))), axis=1)
    objects_per_class = np.bincount(state.target_classes, minlength=nc)
    curves = measure_curves(ranking, objects_per_class[ranking.class_ids])
    precision, recall = curves.precision[:, curves.best], curves.recall[:, curves.best]
    metrics = Metrics(
        precision=_mean(precision),
        recall=_mean(recall),
        map50=_mean(ap[:, 0]),
        map=_mean(ap),
        class_ids=ranking.class_ids,
        per_class=np.stack((precision, recall, ap[:, 0], ap.mean(1)), 1),
        images_per_class=np.bincount(pairs[1], minlength=nc),
        objects_per_class=objects_per_class,
        images=len(state.images),
        objects=len(state.target_classes),
        confidence=float(curves.confidence[curves.best]),
    )
    return metrics, curves


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0


def measure_curves(ranking: Ranking, objects: NDArray[np.int64]) -> Curves:
    """Curves of a ranking whose classes have (C,) `objects`."""
    n = len(ranking.class_ids)
    precision, recall = np.zeros((n, len(CONFIDENCES))), np.zeros((n, len(CONFIDENCES)))
    precision_at_recall = np.zeros((n, len(RECALLS)))
    for c in range(n):
        rows = slice(ranking.offsets[c], ranking.offsets[c + 1])
        correct = ranking.correct50[rows]
        if not correct.size:
            continue
        # How many detections are at least as confident as each point of the axis, and how many of them are correct.
        listed = np.searchsorted(-ranking.scores[rows].astype(np.float64), -CONFIDENCES, side="right")
        found = np.concatenate((np.zeros(1), np.cumsum(correct)))[listed]
        precision[c] = np.where(listed > 0, found / np.maximum(listed, 1), 1.0)
        recall[c] = found / objects[c]

        hit_at = np.flatnonzero(correct)
        envelope, gained = precision_steps(
            np.arange(1.0, len(hit_at) + 1)[:, None],
            hit_at[:, None].astype(np.float64) + 1,
            objects[c : c + 1].astype(np.float32),
        )
        sampled = np.repeat(envelope[:, 0], gained[:, 0])
        precision_at_recall[c, : len(sampled)] = sampled
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-16)
    best = int(smooth(f1.mean(0)).argmax()) if n else 0
    return Curves(
        ranking.class_ids,
        CONFIDENCES,
        precision,
        recall,
        f1,
        RECALLS,
        precision_at_recall,
        precision_at_recall.mean(1),
        best,
    )


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moving average over a tenth of a curve (n,), the ends held: a single lucky point must not decide."""
    half = round(len(values) * SMOOTHING) // 2
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
