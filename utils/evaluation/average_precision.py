"""Average precision, and precision and recall over confidence.

`match_image` → `Accumulator` on every rank → one gather of flat arrays → `merge` (by image, so that the outcome knows
nothing of ranks and batches) → `summarize`. Average precision is COCO's: the precision envelope sampled at 101 recalls,
detections ranked by score over images in ascending order, classes without objects left out of the mean. It equals
pycocotools on the same detections.

Every AP is computed with a weight an image. Ones give the metric; the multiplicities of a resampled set of images give
the bootstrap (utils/evaluation/bootstrap.py), without matching or sorting again.

Legend: N images, D detections, M objects, C classes that have objects, H hits (detections correct at some threshold),
T = 10 IoU thresholds, R columns of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from utils.evaluation.matching import IOU_THRESHOLDS, ImageMatches
from utils.types import Metrics

RECALLS: NDArray[np.float64] = np.linspace(0.0, 1.0, 101)
CONFIDENCES: NDArray[np.float64] = np.linspace(0.0, 1.0, 1000)
SMOOTHING = 0.1  # width of the box filter over a confidence curve, as a share of the axis


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
    """

    images: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    correct: NDArray[np.bool_]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    target_counts: NDArray[np.int64]
    target_classes: NDArray[np.int32]


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
        )


def merge(states: Sequence[MatchState]) -> MatchState:
    """Join the ranks' states by ascending image, whatever the ranks' order and shares.

    Each image must be in one state only: counted twice, it would bend every figure unnoticed.
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
    )


def _rows_of_segments(counts: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row numbers that bring consecutive segments of `counts` rows into `order`."""
    starts = np.cumsum(counts) - counts
    moved = counts[order]
    return np.repeat(starts[order] - (np.cumsum(moved) - moved), moved) + np.arange(counts.sum())


@dataclass(frozen=True)
class Ranking:
    """The sort behind every figure, done once: by class, then score descending, then image, then order in the image.

    Only classes that have objects are in it. Precision can only rise at a hit, so average precision needs no more than
    the hits and how many detections were listed up to each.

    Attributes:
        n_images: N.
        class_ids: int64 (C,), classes that have objects, ascending.
        scores: float32 (D',), ranked; class c has rows `offsets[c]:offsets[c + 1]`.
        correct50: bool (D',), ranked, at IoU 0.5.
        offsets: int64 (C + 1,).
        listed_images: int64 (L,), row of each ranked detection's image; what follows a class's last hit is left out.
        listed_starts: int64 (H,), where in it the detections start that lead up to and include each hit.
        hits: bool (H, T), at which thresholds each hit is correct.
        hit_images: int64 (H,), row of its image.
        hit_offsets: int64 (C + 1,), class c has hits `hit_offsets[c]:hit_offsets[c + 1]`.
        target_images: int64 (M,), row of each object's image, by class.
        target_starts: int64 (C,).
    """

    n_images: int
    class_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    correct50: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    listed_images: NDArray[np.int64]
    listed_starts: NDArray[np.int64]
    hits: NDArray[np.bool_]
    hit_images: NDArray[np.int64]
    hit_offsets: NDArray[np.int64]
    target_images: NDArray[np.int64]
    target_starts: NDArray[np.int64]


def rank(state: MatchState) -> Ranking:
    """Sort the detections of a merged state."""
    rows = np.arange(len(state.images))
    class_ids = np.unique(state.target_classes).astype(np.int64)
    by_class = np.argsort(state.target_classes, kind="stable")
    target_images = np.repeat(rows, state.target_counts)[by_class]
    target_starts = np.searchsorted(state.target_classes[by_class], class_ids)

    order = np.lexsort((-state.scores, state.classes))
    order = order[np.isin(state.classes[order], class_ids)]
    images = np.repeat(rows, state.detection_counts)[order]
    correct = state.correct[order]
    class_rows = np.searchsorted(class_ids, state.classes[order])
    bounds = np.arange(len(class_ids) + 1)
    offsets = np.searchsorted(class_rows, bounds)

    is_hit: NDArray[np.bool_] = np.any(correct, axis=1)
    hit_at = np.flatnonzero(is_hit)
    hit_offsets = np.searchsorted(class_rows[hit_at], bounds)
    hits_before: NDArray[np.int64] = np.cumsum(is_hit) - is_hit
    listed = hits_before < hit_offsets[class_rows + 1]
    # Each stretch of listed detections ends with a hit, so that the next one starts right after it.
    listed_starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(is_hit[listed]) + 1))[: len(hit_at)]
    return Ranking(
        len(rows),
        class_ids,
        state.scores[order],
        correct[:, 0],
        offsets,
        images[listed],
        listed_starts,
        correct[hit_at],
        images[hit_at],
        hit_offsets,
        target_images,
        target_starts,
    )


def average_precision(ranking: Ranking, weights: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """COCO's average precision where image i counts `weights[i]` times.

    Args:
        ranking: of N images.
        weights: float32 (N, R), whole numbers; each column is a reading of the data of its own.

    Returns:
        AP float64 (C, T, R), 0 where the class has no object in that reading; and bool (C, R), whether it has one.
    """
    objects = _segment_sums(weights, ranking.target_images, ranking.target_starts)
    listed = _segment_sums(weights, ranking.listed_images, ranking.listed_starts)
    ap = np.zeros((len(ranking.class_ids), len(IOU_THRESHOLDS), weights.shape[1]))
    for c in range(len(ranking.class_ids)):
        rows = slice(ranking.hit_offsets[c], ranking.hit_offsets[c + 1])
        counts = np.cumsum(listed[rows], 0, dtype=np.float64)
        hit_weights = weights[ranking.hit_images[rows]]
        for t, correct in enumerate(ranking.hits[rows].T):
            found = np.cumsum(hit_weights[correct], 0, dtype=np.float64)
            envelope, gained = _precision_steps(found, counts[correct], objects[c])
            ap[c, t] = np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)
    return ap, objects > 0


def _precision_steps(
    found: NDArray[np.float64], listed: NDArray[np.float64], objects: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Interpolated precision as a step function of recall.

    Args:
        found: (H, R), objects found up to each hit.
        listed: (H, R), detections listed up to each hit.
        objects: (R,), all objects of the class.

    Returns:
        (H, R) the best precision from each hit on, and (H, R) how many of `RECALLS` that hit is the first to reach.
    """
    precision = found / np.maximum(listed, 1)
    envelope = np.maximum.accumulate(precision[::-1], 0)[::-1]
    recall = found / np.maximum(objects, 1)
    # How many of RECALLS are at most `recall`: floor(100 · recall) + 1, less one where the grid's double lies a hair
    # above an equal recall (7 · 0.01 > 7 / 100), because pycocotools compares doubles.
    reached = (recall * (len(RECALLS) - 1) + 1e-9).astype(np.int64)
    reached += RECALLS[reached] <= recall
    return envelope, np.diff(reached, axis=0, prepend=0)


def _segment_sums(
    weights: NDArray[np.float32], images: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Sums of `weights[images]` over the segments that begin at `starts`: (N, R) to (len(starts), R).

    An embedding bag gathers and adds in one pass; its float32 is exact, for whole numbers stay below 2**24.
    """
    if len(starts) == 0:
        return np.zeros((0, weights.shape[1]), np.float32)
    return embedding_bag(
        torch.from_numpy(images), torch.from_numpy(weights), torch.from_numpy(starts), mode="sum"
    ).numpy()


@dataclass(frozen=True)
class Curves:
    """What the plots of a validation draw; rows are the classes that have objects.

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
    curves = _curves(ranking, objects_per_class[ranking.class_ids])
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


def _curves(ranking: Ranking, objects: NDArray[np.int64]) -> Curves:
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
        envelope, gained = _precision_steps(
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


def smooth(values: NDArray[np.float64], share: float = SMOOTHING) -> NDArray[np.float64]:
    """Moving average over `share` of a curve (n,), the ends held: a single lucky point must not decide."""
    half = round(len(values) * share) // 2
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
