"""How far mAP would move with another set of images of the same kind: a percentile bootstrap (Efron 1979)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import Ranking, average_precision

ROUNDS = 500  # resampled sets
LEVEL = 0.95  # share of them between the bounds
_CHUNK = 50  # rounds at a time: bounds memory, and keeps a class's working set in the processor's cache


class Intervals(NamedTuple):
    """Bounds (low, high) of mAP50 and of mAP50-95; NaN without images or objects."""

    map50: tuple[float, float]
    map: tuple[float, float]


def bootstrap_interval(ranking: Ranking, rng: np.random.Generator) -> Intervals:
    """95 % interval of mAP over sets of N images sampled with replacement from the N images of `ranking`.

    An image sampled k times counts k times, its matches unchanged; a class without objects in a round is left out of
    that round's mean, as it would be in a validation.

    Args:
        ranking: of all images.
        rng: source of the resampling, such as `sample_rng(seed, 0, 0, "bootstrap")`.
    """
    samples = bootstrap_maps(ranking, rng, ROUNDS)
    if np.isnan(samples).all():
        return Intervals((float("nan"),) * 2, (float("nan"),) * 2)
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(samples, (tail, 1 - tail), axis=1)
    return Intervals((float(low[0]), float(high[0])), (float(low[1]), float(high[1])))


def bootstrap_maps(ranking: Ranking, rng: np.random.Generator, rounds: int) -> NDArray[np.float64]:
    """mAP50 and mAP50-95 of `rounds` resampled sets, (2, rounds); NaN where a set has no object at all."""
    n = ranking.n_images
    maps = np.full((2, rounds), np.nan)
    if n == 0:
        return maps
    for start in range(0, rounds, _CHUNK):
        size = min(_CHUNK, rounds - start)
        sampled = rng.integers(n, size=(n, size)) * size + np.arange(size)
        weights = np.bincount(sampled.ravel(), minlength=n * size).reshape(n, size).astype(np.float32)
        ap, present = average_precision(ranking, weights)
        classes = present.sum(0)
        means = np.stack((ap[:, 0].sum(0), ap.mean(1).sum(0))) / np.maximum(classes, 1)
        maps[:, start : start + size] = np.where(classes > 0, means, np.nan)
    return maps
