"""The metrics in the plain way, from every match of every image at once: an oracle, and the baseline of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import RECALLS
from tessera.utils.evaluation.curves import smooth
from tessera.utils.evaluation.matches import CONFIDENCES
from tessera.utils.evaluation.matching import IOU_THRESHOLDS, ImageMatches


class Plain(NamedTuple):
    """Matches of many images, by ascending image: every detection with a byte a threshold."""

    images: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    correct: NDArray[np.bool_]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    target_counts: NDArray[np.int64]
    target_classes: NDArray[np.int32]
    in_regions: NDArray[np.uint8]

    @classmethod
    def of(cls, found: Iterable[tuple[int, ImageMatches]]) -> Plain:
        """Of images by their index in the dataset."""
        images, matches = zip(*sorted(found, key=lambda pair: pair[0]), strict=True)
        return cls(
            np.array(images, np.int64),
            np.array([len(m.scores) for m in matches], np.int64),
            np.concatenate([m.correct for m in matches]),
            np.concatenate([m.scores for m in matches]),
            np.concatenate([m.classes for m in matches]),
            np.array([len(m.target_classes) for m in matches], np.int64),
            np.concatenate([m.target_classes for m in matches]),
            np.concatenate([m.in_regions for m in matches]),
        )


class PlainFigures(NamedTuple):
    """As in `Metrics` and `Curves`."""

    class_ids: NDArray[np.int64]
    ap: NDArray[np.float64]  # (C, T)
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    f1: NDArray[np.float64]
    precision_at_recall: NDArray[np.float64]
    confidence: float
    images_per_class: NDArray[np.int64]
    objects_per_class: NDArray[np.int64]


def plain_figures(state: Plain, nc: int) -> PlainFigures:
    """Sort everything, then go through each class."""
    class_ids = np.unique(state.target_classes).astype(np.int64)
    order = np.lexsort((-state.scores, state.classes))
    order = order[np.isin(state.classes[order], class_ids)]
    scores, classes, correct = state.scores[order].astype(np.float64), state.classes[order], state.correct[order]
    ignored = ~correct & (np.arange(len(IOU_THRESHOLDS)) < state.in_regions[order][:, None])
    offsets = np.searchsorted(classes, [*class_ids, nc])
    objects = np.bincount(state.target_classes, minlength=nc)
    ap = np.zeros((len(class_ids), len(IOU_THRESHOLDS)))
    precision, recall = np.zeros((len(class_ids), 1000)), np.zeros((len(class_ids), 1000))
    precision_at_recall = np.zeros((len(class_ids), len(RECALLS)))
    for c, class_id in enumerate(class_ids):
        rows = slice(offsets[c], offsets[c + 1])
        for t in range(len(IOU_THRESHOLDS)):
            hits = correct[rows, t][~ignored[rows, t]]
            at = np.flatnonzero(hits)
            envelope, gained = _steps(np.arange(1.0, len(at) + 1), at + 1.0, float(objects[class_id]))
            ap[c, t] = np.einsum("hr,hr->r", envelope[:, None], gained[:, None])[0] / len(RECALLS)
            if t == 0:
                sampled = np.repeat(envelope, gained)
                precision_at_recall[c, : len(sampled)] = sampled
        counted = ~ignored[rows, 0]
        if not counted.any():
            continue
        listed = np.searchsorted(-scores[rows][counted], -CONFIDENCES, side="right")
        found = np.concatenate((np.zeros(1), np.cumsum(correct[rows, 0][counted])))[listed]
        precision[c] = np.where(listed > 0, found / np.maximum(listed, 1), 1.0)
        recall[c] = found / objects[class_id]
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-16)
    best = int(smooth(f1.mean(0)).argmax()) if len(class_ids) else 0
    image_rows = np.repeat(np.arange(len(state.images)), state.target_counts)
    pairs = np.unique(np.stack((image_rows, state.target_classes.astype(np.int64))), axis=1)
    return PlainFigures(
        class_ids,
        ap,
        precision,
        recall,
        f1,
        precision_at_recall,
        float(CONFIDENCES[best]),
        np.bincount(pairs[1], minlength=nc),
        objects,
    )


def _steps(
    found: NDArray[np.float64], listed: NDArray[np.float64], objects: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Interpolated precision from each hit on, and how many of `RECALLS` it is the first to reach."""
    envelope = np.maximum.accumulate((found / listed)[::-1])[::-1]
    recall = found / objects
    return envelope, np.diff(np.searchsorted(RECALLS, recall, side="right"), prepend=0)
