"""Differences B − A of mAP and of each class's AP, with confidence intervals and p-values, in NumPy.

One run a side: results are swapped between the sides on a random half of the images (a permutation test; Fisher 1935,
Good 2005). Interval and p-value come from the same rounds and agree: the interval excludes 0 where p is below 0.05. A
bootstrap would not do: a class on one image is in a resampled set unchanged or not at all, so that its noise is
missing.

Several runs a side: the variance of the difference of means is that of a paired bootstrap over the images, plus that of
the runs of a side. Interval and p-value are Student's t with Satterthwaite's degrees of freedom. Resampling two or
three runs would give far too narrow an interval. Part of the variance between runs is counted twice, on the safe side.

Legend: N images, C classes that have objects, D detections of a side, K runs of a side, R rounds,
F = 2 + C metrics: mAP50, mAP50-95, the APs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import (
    ClassPrecisions,
    Ranking,
    chunks,
    class_precisions,
    ranking_of,
    resampled,
)
from tessera.utils.evaluation.curves import images_of_classes
from tessera.utils.evaluation.matching import Matches
from tessera.utils.seeding import sample_rng

LEVEL = 0.05  # of significance
_COUNTED = 10  # extreme rounds from which on their fraction is the p-value
_POINTS = 1001  # of an integral
_TWO_SIDED, _FOUR_OF_FIVE = 1.959964, 0.841621  # quantiles of the normal distribution: 97.5 %, 80 %
ROUNDS = 1000  # of the bootstrap
PERMUTATIONS = 999  # with the observed one, a thousand
Floats = NDArray[np.float64]


def permutation_p_value(observed: float, swapped: NDArray[np.float64], images: int) -> float:
    """Return the two-sided p-value of a difference from those with random images swapped, (R,).

    It is the fraction of rounds with as large a difference, the observed one included. Where they are too few to count,
    the normal tail of the same variance is used, at least 2^(1 - images): no smaller value is possible if `images`
    images can change the difference.
    """
    extreme = int((np.abs(swapped) >= abs(observed) - 1e-12).sum())
    p = (1 + extreme) / (1 + len(swapped))
    if extreme >= _COUNTED or not swapped.any():
        return p
    tail = math.erfc(abs(observed) / math.sqrt(2 * float((swapped**2).mean())))
    return float(min(p, max(tail, 2.0 ** (1 - images))))


def permutation_half_width(swapped: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far from 0 a difference (n,) must be for a p-value below `LEVEL`; `swapped` is (n, R)."""
    extreme = math.ceil(LEVEL * (1 + swapped.shape[1])) - 2  # rounds that may be as far
    return -np.partition(-np.abs(swapped), extreme, axis=1)[:, extreme]


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Correct p-values (n,) for multiple comparisons (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return corrected


def student_tail(t: float, freedom: int) -> float:
    """Return the two-sided tail probability of Student's t with `freedom` degrees of freedom.

    With t = √freedom · tan θ its density is proportional to cos θ ^ (freedom - 1) (Abramowitz and Stegun 26.7).
    """
    start = math.atan(abs(t) / math.sqrt(freedom))
    return _integral(start, freedom) / _integral(0.0, freedom)


def _integral(start: float, freedom: int) -> float:
    """Integrate cos θ ^ (freedom - 1) from `start` to π/2, for freedom >= 1."""
    # Nothing is left beyond twenty standard deviations: the points lie within them.
    end = min(math.pi / 2, start + 20 / math.sqrt(freedom))
    values = np.cos(np.linspace(start, end, _POINTS)).clip(0) ** (freedom - 1)
    weights = np.ones(_POINTS)  # Simpson's rule
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float(weights @ values) * (end - start) / (3 * (_POINTS - 1))


def student_quantile(level: float, freedom: int) -> float:
    """Return the t whose two-sided tail probability is `level`."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > level:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > level else (low, middle)
    return high


def images_needed(difference: float, images: int, image_variance: float, seed_variance: float) -> int | None:
    """Return how many images would show a difference, not 0, in four of five cases; None where no number would.

    The variance of the difference by the choice of the `images` evaluated falls as their number grows; that by the
    choice of trainings does not.
    """
    allowed = (difference / (_TWO_SIDED + _FOUR_OF_FIVE)) ** 2 - seed_variance
    return math.ceil(images * image_variance / allowed) if allowed > 0 else None


class MetricDifference(NamedTuple):
    """A metric of both sides, means over their runs; b - a with its 95 % interval and two-sided p-value."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float


class ClassDifference(NamedTuple):
    """AP of a class; `p_holm` is `ap.p`, corrected for the number of classes."""

    class_id: int
    images: int
    objects: int
    ap: MetricDifference
    p_holm: float


class Differences(NamedTuple):
    """All differences of a comparison."""

    map50: MetricDifference
    map: MetricDifference
    classes: tuple[ClassDifference, ...]  # that have objects, ascending
    images: int  # N
    image_variance: float  # of the difference of mAP50-95, by the choice of images
    seed_variance: float  # by the choice of trainings; 0 with one run a side


class _Spread(NamedTuple):
    """Variances (F,) by images and by trainings; bounds and p-values (F,)."""

    by_images: Floats
    by_seeds: Floats
    low: Floats
    high: Floats
    p: Floats


def differences(a: Sequence[Ranking], b: Sequence[Ranking], matches: tuple[Matches, Matches] | None) -> Differences:
    """Compare the runs of two sides on the same images; `matches` of both if each side is one run."""
    ranking = a[0]
    assert all(np.array_equal(ranking.target_images, other.target_images) for other in (*a, *b)), "the same images"
    images = images_of_classes(ranking)
    counts = np.array([ranking.n_images, ranking.n_images, *images])
    measured_a, measured_b = _measured(a), _measured(b)
    if matches is not None:
        spread = _of_one_run(measured_b[0] - measured_a[0], matches, counts)
    else:
        moved = _resampled_mean(b) - _resampled_mean(a)
        spread = _of_several_runs(measured_a, measured_b, np.nanvar(moved, axis=1, ddof=1), counts)
    means = measured_a.mean(0), measured_b.mean(0)
    columns = (*means, means[1] - means[0], spread.low, spread.high, spread.p)
    map50, overall, *classes = (MetricDifference(*row) for row in np.stack(columns, 1).tolist())
    corrected = holm(spread.p[2:]).tolist()
    objects = np.diff(ranking.target_offsets).tolist()
    named = zip(ranking.class_ids.tolist(), images.tolist(), objects, classes, corrected, strict=True)
    return Differences(
        map50,
        overall,
        tuple(ClassDifference(*row) for row in named),
        ranking.n_images,
        float(spread.by_images[1]),
        float(spread.by_seeds[1]),
    )


def _measured(side: Sequence[Ranking]) -> Floats:
    """Return the metrics of each run, (K, F)."""
    ones = [np.ones((side[0].n_images, 1), np.float32)]
    return np.stack([_figures(class_precisions(ranking, ones))[:, 0] for ranking in side])


def _resampled_mean(side: Sequence[Ranking]) -> Floats:
    """Return mean metrics of the runs on resampled images, (F, R); the same images for every side."""
    return np.mean([_figures(resampled(run, sample_rng(0, 0, 0, "bootstrap"), ROUNDS)) for run in side], axis=0)


def _figures(found: ClassPrecisions) -> Floats:
    """Return metrics (F, R); NaN where a class has no object in a round."""
    return np.concatenate((found.maps(), np.where(found.present, found.ap, np.nan)))


def _of_one_run(observed: Floats, matches: tuple[Matches, Matches], images: NDArray[np.int64]) -> _Spread:
    swapped_a, swapped_b = map(_figures, permuted_sides(*matches, sample_rng(0, 0, 1, "bootstrap")))
    swapped = swapped_b - swapped_a
    by_images = (swapped**2).mean(1)
    reach = permutation_half_width(swapped)
    p = np.array([permutation_p_value(*row) for row in zip(observed.tolist(), swapped, images.tolist(), strict=True)])
    return _Spread(by_images, np.zeros_like(by_images), observed - reach, observed + reach, p)


def _of_several_runs(a: Floats, b: Floats, by_images: Floats, images: NDArray[np.int64]) -> _Spread:
    observed = b.mean(0) - a.mean(0)
    several = [side for side in (a, b) if len(side) > 1]
    if len(several) == 2:
        parts = [(runs.var(0, ddof=1) / len(runs), len(runs) - 1) for runs in several]
    else:  # assume that the trainings of the side with one run vary as those of the other
        (runs,) = several
        parts = [(runs.var(0, ddof=1) * (1 + 1 / len(runs)), len(runs) - 1)]
    by_seeds = np.sum([variance for variance, _ in parts], axis=0)
    total = by_images + by_seeds
    low, high, p = observed.copy(), observed.copy(), np.ones_like(observed)
    for f in np.flatnonzero((total > 0) & (images > 1)).tolist():  # a class on one image says nothing of others
        spent = by_images[f] ** 2 / (images[f] - 1) + sum(variance[f] ** 2 / free for variance, free in parts)
        freedom, error = max(int(total[f] ** 2 / spent), 1), math.sqrt(total[f])
        reach = error * student_quantile(LEVEL, freedom)
        low[f], high[f] = observed[f] - reach, observed[f] + reach
        p[f] = student_tail(observed[f] / error, freedom)
    return _Spread(by_images, by_seeds, low, high, p)


def permuted_sides(a: Matches, b: Matches, rng: np.random.Generator) -> tuple[ClassPrecisions, ClassPrecisions]:
    """Evaluate the two sides after each of `PERMUTATIONS` random swaps of images."""
    images = a.images
    assert np.array_equal(images, b.images), "both sides are of the same images"
    offset = int(images.max(initial=-1)) + 1
    ranking = ranking_of(Matches.joined([_with_rank_scores(a), _with_rank_scores(b)._replace(images=images + offset)]))
    swapped = rng.integers(2, size=(len(images), PERMUTATIONS), dtype=np.uint8)

    def weights(of_b: int) -> Iterator[NDArray[np.float32]]:
        start = 0
        for size in chunks(PERMUTATIONS):
            taken = swapped[:, start : start + size] ^ of_b  # 1 = the side's result on an image is B's
            yield np.concatenate((1 - taken, taken)).astype(np.float32)
            start += size

    return class_precisions(ranking, weights(0)), class_precisions(ranking, weights(1))


def _with_rank_scores(matches: Matches) -> Matches:
    """Replace scores by ranks 0, -1, -2 … among all detections of a side, of classes that have objects.

    Scores of two models may differ in scale. Ranks among all detections change no AP. Ranks within a class say too
    little of a rare class: more than 5 % of equal sides were found to differ.
    """
    at = np.flatnonzero(np.isin(matches.classes, matches.target_classes))
    images = np.repeat(np.arange(len(matches.images)), matches.detection_counts)[at]
    scores = np.zeros_like(matches.scores)
    scores[at[np.lexsort((images, matches.classes[at], -matches.scores[at]))]] = -np.arange(len(at))
    return matches._replace(scores=scores)
