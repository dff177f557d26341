"""Confidence intervals of mAP by a percentile bootstrap over the images (Efron 1979)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import Ranking, average_precision

ROUNDS = 500  # resampled sets
LEVEL = 0.95  # fraction of them between the bounds
_CHUNK = 50  # rounds at a time, to bound memory and fit the processor's cache


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
