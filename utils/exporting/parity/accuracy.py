"""mAP of a network and of the files that were made of it, on the same images, and how sure the difference is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.utils.evaluation.average_precision import Ranking
from tessera.utils.evaluation.bootstrap import LEVEL, ROUNDS, bootstrap_interval, bootstrap_maps
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.seeding import sample_rng


class Accuracy(NamedTuple):
    """mAP50-95 with its 95 % interval, and what it is below the reference's, with the interval of that.

    The difference's interval is of the same resampled images for both: it tells a file from its network far better than
    two intervals beside each other do.
    """

    map: float
    interval: tuple[float, float]
    drop: float
    drop_interval: tuple[float, float]


def accuracy(found: Evaluation, reference: Evaluation) -> Accuracy:
    """The figures of `found`, beside those of the network that it was made of."""
    interval = bootstrap_interval(found.ranking, sample_rng(0, 0, 0, "bootstrap")).map
    drops = _maps(reference.ranking) - _maps(found.ranking)
    tail = (1 - LEVEL) / 2
    known = drops[np.isfinite(drops)]
    low, high = np.quantile(known, (tail, 1 - tail)).tolist() if len(known) else (np.nan, np.nan)
    return Accuracy(found.metrics.map, interval, reference.metrics.map - found.metrics.map, (low, high))


def _maps(ranking: Ranking) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """mAP50-95 of resampled sets; of two rankings of the same images, the same ones."""
    return np.asarray(bootstrap_maps(ranking, sample_rng(0, 0, 0, "bootstrap"), ROUNDS)[1])
