"""Average precision as COCO computes it.

The precision envelope sampled at 101 recalls, detections ranked by score over images in ascending order, classes
without objects left out of the mean. It equals pycocotools on the same detections.

Every AP is computed with a weight an image. Ones give the metric; the multiplicities of a resampled set of images give
the bootstrap (utils/evaluation/bootstrap.py), without matching or sorting again.

Legend: N images, D detections, M objects, C classes that have objects, H hits (detections correct at some threshold),
I detections that are ignored at some threshold, T = 10 IoU thresholds, R columns of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from utils.evaluation.match_state import MatchState
from utils.evaluation.matching import IOU_THRESHOLDS

RECALLS: NDArray[np.float64] = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class Ranking:
    """The sort behind every figure, done once: by class, then score descending, then image, then order in the image.

    Only classes that have objects are in it. Precision can only rise at a hit, so average precision needs no more than
    the hits and how many detections were listed up to each.

    Attributes:
        n_images: N.
        class_ids: int64 (C,), classes that have objects, ascending.
        scores: float32 (D',), ranked, of those that count at IoU 0.5; class c has rows `offsets[c]:offsets[c + 1]`.
        correct50: bool (D',), ranked, at IoU 0.5.
        offsets: int64 (C + 1,).
        listed_images: int64 (L,), row of each ranked detection's image; what follows a class's last hit is left out.
        listed_starts: int64 (H,), where in it the detections start that lead up to and include each hit.
        hits: bool (H, T), at which thresholds each hit is correct.
        hit_images: int64 (H,), row of its image.
        hit_offsets: int64 (C + 1,), class c has hits `hit_offsets[c]:hit_offsets[c + 1]`.
        target_images: int64 (M,), row of each object's image, by class.
        target_starts: int64 (C,).
        ignored: bool (I, T), at which thresholds listed detections are ignored, for they lie in crowd regions.
        ignored_images: int64 (I,), row of their images.
        ignored_hits: int64 (I,), the hit that each leads up to, or is.
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
    ignored: NDArray[np.bool_]
    ignored_images: NDArray[np.int64]
    ignored_hits: NDArray[np.int64]


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
    ignored = ~correct & (np.arange(len(IOU_THRESHOLDS)) < state.in_crowds[order][:, None])
    counted = ~ignored[:, 0]

    is_hit: NDArray[np.bool_] = np.any(correct, axis=1)
    hit_at = np.flatnonzero(is_hit)
    hit_offsets = np.searchsorted(class_rows[hit_at], bounds)
    hits_before: NDArray[np.int64] = np.cumsum(is_hit) - is_hit
    listed = hits_before < hit_offsets[class_rows + 1]
    ignored_at = np.flatnonzero(ignored.any(1) & listed)
    # Each stretch of listed detections ends with a hit, so that the next one starts right after it.
    listed_starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(is_hit[listed]) + 1))[: len(hit_at)]
    return Ranking(
        len(rows),
        class_ids,
        state.scores[order][counted],
        correct[counted, 0],
        np.searchsorted(class_rows[counted], bounds),
        images[listed],
        listed_starts,
        correct[hit_at],
        images[hit_at],
        hit_offsets,
        target_images,
        target_starts,
        ignored[ignored_at],
        images[ignored_at],
        hits_before[ignored_at],
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
        ignored = _ignored_counts(ranking, rows, weights)
        for t, correct in enumerate(ranking.hits[rows].T):
            found = np.cumsum(hit_weights[correct], 0, dtype=np.float64)
            counted = counts[correct] if ignored is None else (counts - ignored[t])[correct]
            envelope, gained = precision_steps(found, counted, objects[c])
            ap[c, t] = np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)
    return ap, objects > 0


def _ignored_counts(ranking: Ranking, rows: slice, weights: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """How many of the detections listed up to each hit `rows` are ignored at each threshold: (T, H, R), or None."""
    own = slice(*np.searchsorted(ranking.ignored_hits, (rows.start, rows.stop)).tolist())
    if own.start == own.stop:
        return None
    counts = np.zeros((rows.stop - rows.start, len(IOU_THRESHOLDS), weights.shape[1]))
    added = ranking.ignored[own, :, None] * weights[ranking.ignored_images[own], None].astype(np.float64)
    np.add.at(counts, ranking.ignored_hits[own] - rows.start, added)
    return np.cumsum(counts, 0).transpose(1, 0, 2)


def precision_steps(
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
    # How many of RECALLS are at most `recall`: floor(100 · recall) + 1, less one where the grid's double lies just
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
