"""Generators of each sample by (seed, epoch, position), random subsets, `ValFraction`.

A sample's generator is a pure function of (seed, epoch, position). The stream of samples is therefore equal for any
number of workers and ranks, and after a resume.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_STREAMS = {"sample": 0, "order": 1, "size": 2, "anchors": 3, "evolve": 4, "bootstrap": 5, "sizes": 6, "transform": 7}


class ValFraction(NamedTuple):
    """Fraction of the training images that is held out for validation, and the seed of their choice."""

    fraction: float
    seed: int


def sample_rng(seed: int, epoch: int, position: int, stream: str = "sample") -> np.random.Generator:
    """Return the generator of a sample or of an epoch's order (Philox, Salmon et al. 2011).

    Args:
        seed: of the run, not offset by rank.
        epoch, position: from 0, in the epoch's global order.
        stream: purpose; different streams are independent.
    """
    assert 0 <= position < 2**32 and 0 <= epoch < 2**24, (position, epoch)
    counter = (_STREAMS[stream] << 56) | (epoch << 32) | position
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, counter], np.uint64)))


def sample_indices(most: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return at most `most` distinct indices below `count`, ascending, chosen by `rng` if there are more."""
    if count <= most:
        return np.arange(count)
    return np.sort(rng.choice(count, most, replace=False, shuffle=False))
