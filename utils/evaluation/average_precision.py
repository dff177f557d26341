"""COCO average precision, equal to pycocotools on the same detections, and its confidence intervals.

The precision envelope is sampled at 101 recalls. Detections are ranked by score, then by image. Classes without objects
are excluded from the mean.

Every AP takes a weight per image. Ones give the metric; the multiplicities of a resampled set of images give the
percentile bootstrap (Efron 1979), without matching or sorting again.

Legend: N images, D detections, M objects, C classes that have objects, H hits (detections correct at some threshold),
I detections ignored at some threshold, T = 10 IoU thresholds, R columns of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from tessera.utils.evaluation.matching import CONFIDENCES, IOU_THRESHOLDS, Matches

RECALLS: NDArray[np.float64] = np.linspace(0.0, 1.0, 101)
ROUNDS = 500  # resampled sets
LEVEL = 0.95  # fraction of them between the bounds
_CHUNK = 50  # rounds at a time, to bound memory and fit the processor's cache
STEPS = len(CONFIDENCES) + 1  # how many of them a score may reach: none, or up to all


@dataclass(frozen=True)
class Ranking:
    """Detections sorted by class, descending score, image and order in the image; only classes that have objects.

    Precision can only rise at a hit. So AP needs the hits, and the number of detections listed up to each.

    Attributes:
        class_ids: (C,), ascending; class c has hits `hit_offsets[c]:hit_offsets[c + 1]`, likewise objects.
        listed_images: (L,), image row of each ranked detection, up to the last hit of its class.
        listed_starts: (H + 1,), where the detections start that lead up to and include each hit.
        hits: (H, T), the thresholds at which each hit is correct; `hit_images` (H,), its image row.
        target_images: (M,), image row of each object, by class.
        ignored: (I, T), the thresholds at which a listed detection is ignored, as it lies in an ignored region;
            `ignored_images` (I,), image rows; `ignored_hits` (I,), the hit that each leads up to, or is.
        above, correct_above: (C, 1000), detections at least as confident as each of `CONFIDENCES` that count at IoU
            0.5, and the correct ones of them.
    """

    n_images: int
    class_ids: NDArray[np.int64]
    listed_images: NDArray[np.int32]
    listed_starts: NDArray[np.int64]
    hits: NDArray[np.bool_]
    hit_images: NDArray[np.int32]
    hit_offsets: NDArray[np.int64]
    target_images: NDArray[np.int32]
    target_offsets: NDArray[np.int64]
    ignored: NDArray[np.bool_]
    ignored_images: NDArray[np.int32]
    ignored_hits: NDArray[np.int64]
    above: NDArray[np.int32]
    correct_above: NDArray[np.int32]


def ranking_of(matches: Matches) -> Ranking:
    """Sort the detections of a validation."""
    class_ids = np.unique(matches.target_classes).astype(np.int64)
    bounds = np.arange(len(class_ids) + 1)
    target_rows = np.searchsorted(class_ids, matches.target_classes)
    targets = np.argsort(target_rows, kind="stable")
    rows = np.arange(len(matches.images), dtype=np.int32)
    found = np.flatnonzero(np.isin(matches.classes, class_ids))
    classes = np.searchsorted(class_ids, matches.classes[found]).astype(np.int32)
    images = rows.repeat(matches.detection_counts)[found]
    order = np.lexsort((images, -matches.scores[found], classes))
    found, classes, images = found[order], classes[order], images[order]
    right, ignored = matches.correct[found], matches.ignored[found]
    reached = np.searchsorted(CONFIDENCES, matches.scores[found].astype(np.float64), side="right")
    steps = classes.astype(np.int64) * STEPS + reached
    # By class and step, (C, STEPS); then those that reach each of CONFIDENCES, (C, 1000).
    by_step = (
        np.bincount(steps[counts], minlength=len(class_ids) * STEPS).reshape(-1, STEPS)
        for counts in (ignored & 1 == 0, right & 1 == 1)
    )
    above, correct_above = (counts[:, :0:-1].cumsum(1, dtype=np.int32)[:, ::-1] for counts in by_step)
    is_hit: NDArray[np.bool_] = right > 0
    hit_at = np.flatnonzero(is_hit)
    hit_offsets = np.searchsorted(classes[hit_at], bounds)
    hits_before: NDArray[np.int64] = np.cumsum(is_hit) - is_hit
    listed = hits_before < hit_offsets[classes + 1]
    ignored_at = np.flatnonzero((ignored > 0) & listed)
    return Ranking(
        n_images=len(matches.images),
        class_ids=class_ids,
        listed_images=images[listed],
        listed_starts=np.concatenate((np.zeros(1, np.int64), np.cumsum(listed)[hit_at])),
        hits=_flags(right[hit_at]),
        hit_images=images[hit_at],
        hit_offsets=hit_offsets,
        target_images=rows.repeat(matches.target_counts)[targets],
        target_offsets=np.searchsorted(target_rows[targets], bounds),
        ignored=_flags(ignored[ignored_at]),
        ignored_images=images[ignored_at],
        ignored_hits=hits_before[ignored_at],
        above=above,
        correct_above=correct_above,
    )


def _flags(bits: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Unpack bits (n,) to (n, T), column t from bit t."""
    return bits[:, None] >> np.arange(len(IOU_THRESHOLDS), dtype=np.uint16) & 1 == 1


def average_precision(ranking: Ranking, weights: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compute COCO's average precision where image i counts `weights[i]` times.

    `weights` are float32 (N, R), whole numbers; each column is a resampling of its own.

    Returns:
        AP float64 (C, T, R), 0 where the class has no object; and bool (C, R), whether it has one.
    """
    ap = np.zeros((len(ranking.class_ids), len(IOU_THRESHOLDS), weights.shape[1]))
    for c, thresholds in enumerate(class_precision_steps(ranking, weights)):
        for t, (envelope, gained) in enumerate(thresholds):
            ap[c, t] = np.einsum("hr,hr->r", envelope, gained) / len(RECALLS)
    return ap, _segment_sums(weights, ranking.target_images, ranking.target_offsets) > 0


def class_precision_steps(
    ranking: Ranking, weights: NDArray[np.float32]
) -> Iterator[Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]]:
    """Yield for each class an iterator of its `precision_steps` at each of `IOU_THRESHOLDS`."""
    objects = _segment_sums(weights, ranking.target_images, ranking.target_offsets)
    listed = _segment_sums(weights, ranking.listed_images, ranking.listed_starts)
    for c, class_objects in enumerate(objects):
        rows = slice(ranking.hit_offsets[c], ranking.hit_offsets[c + 1])
        counts = np.cumsum(listed[rows], 0, dtype=np.float64)
        yield _threshold_steps(ranking, rows, weights, counts, class_objects)


def _threshold_steps(
    ranking: Ranking,
    rows: slice,
    weights: NDArray[np.float32],
    counts: NDArray[np.float64],
    objects: NDArray[np.float32],
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Yield the steps of the class whose hits are `rows`, from its listed detections (H, R) and objects (R,)."""
    hit_weights = weights[ranking.hit_images[rows]]
    ignored = _ignored_counts(ranking, rows, weights)
    for t, correct in enumerate(ranking.hits[rows].T):
        found = np.cumsum(hit_weights[correct], 0, dtype=np.float64)
        counted = counts[correct] if ignored is None else (counts - ignored[t])[correct]
        yield precision_steps(found, counted, objects)


def _ignored_counts(ranking: Ranking, rows: slice, weights: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Count the ignored detections listed up to each hit of `rows` at each threshold, (T, H, R); None without any."""
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
    """Return interpolated precision as a step function of recall.

    Takes true positives and listed detections up to each hit, (H, R), and the objects of the class, (R,). Returns the
    best precision from each hit on, and how many of `RECALLS` that hit is the first to reach, (H, R).
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
    weights: NDArray[np.float32], images: NDArray[np.int32], offsets: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Sum `weights[images]` over the segments between `offsets`: (N, R) to (len(offsets) - 1, R).

    An embedding bag gathers and adds in one pass. Its float32 is exact: whole numbers stay below 2**24.
    """
    if len(offsets) == 1:
        return np.zeros((0, weights.shape[1]), np.float32)
    starts = torch.from_numpy(offsets[:-1].astype(np.int32))
    return embedding_bag(torch.from_numpy(images), torch.from_numpy(weights), starts, mode="sum").numpy()


class Intervals(NamedTuple):
    """Bounds (low, high) of mAP50 and mAP50-95; NaN without images or objects."""

    map50: tuple[float, float]
    map: tuple[float, float]


def bootstrap_interval(ranking: Ranking, rng: np.random.Generator) -> Intervals:
    """Return the 95 % interval of mAP over sets of N images sampled with replacement.

    An image sampled k times counts k times. A class without objects in a round is excluded from that round's mean.
    """
    samples = resampled(ranking, rng, ROUNDS).maps()
    if np.isnan(samples).all():
        return Intervals((float("nan"),) * 2, (float("nan"),) * 2)
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(samples, (tail, 1 - tail), axis=1)
    return Intervals((float(low[0]), float(high[0])), (float(low[1]), float(high[1])))


class ClassPrecisions(NamedTuple):
    """Average precision of C classes in R resampled sets.

    Attributes:
        ap50, ap: float64 (C, R), at IoU 0.5 and over 0.5:0.05:0.95; 0 where the class has no object.
        present: bool (C, R), whether it has one.
    """

    ap50: NDArray[np.float64]
    ap: NDArray[np.float64]
    present: NDArray[np.bool_]

    def maps(self) -> NDArray[np.float64]:
        """Return mAP50 and mAP50-95 over the classes that are present, (2, R); NaN where none is."""
        classes = self.present.sum(0)
        means = np.stack((self.ap50.sum(0), self.ap.sum(0))) / np.maximum(classes, 1)
        return np.where(classes > 0, means, np.nan)


def resampled(ranking: Ranking, rng: np.random.Generator, rounds: int) -> ClassPrecisions:
    """Evaluate `rounds` sets of N images sampled with replacement; equal sets for equal N and `rng` state."""
    n = ranking.n_images

    def counts(size: int) -> NDArray[np.float32]:
        sampled = rng.integers(n, size=(n, size)) * size + np.arange(size)
        return np.bincount(sampled.ravel(), minlength=n * size).reshape(n, size).astype(np.float32)

    return class_precisions(ranking, (counts(size) for size in chunks(rounds if n else 0)))


def chunks(rounds: int) -> list[int]:
    """Split `rounds` into numbers of weight columns that are computed together."""
    return [min(_CHUNK, rounds - start) for start in range(0, rounds, _CHUNK)]


def class_precisions(ranking: Ranking, weights: Iterable[NDArray[np.float32]]) -> ClassPrecisions:
    """Evaluate each column of the weights (N, r)."""
    none = np.zeros((len(ranking.class_ids), 0))
    ap50, means, there = [none], [none], [none.astype(np.bool_)]
    for some in weights:
        ap, present = average_precision(ranking, some)
        ap50.append(ap[:, 0])
        means.append(ap.mean(1))
        there.append(present)
    return ClassPrecisions(np.concatenate(ap50, 1), np.concatenate(means, 1), np.concatenate(there, 1))
