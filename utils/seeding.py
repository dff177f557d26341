"""Randomness: process-level seeds offset by rank, and counter-based generators for samples.

No random number of a sample depends on the process that makes it: its generator is a pure function of (seed, epoch,
position), so the stream of samples is the same for any number of workers and ranks, and after any resume.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_STREAMS = {"sample": 0, "order": 1, "size": 2, "anchors": 3, "evolve": 4, "bootstrap": 5, "sizes": 6}


class HeldOut(NamedTuple):
    """A share of the training images that is validated on, and the seed by which they are chosen."""

    share: float
    seed: int


def init_seeds(seed: int) -> None:
    """Seed Python, NumPy and torch of this process; callers pass seed + 1 + rank. NumPy takes it modulo 2**32."""
    seed %= 2**32
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the process-level generator that third-party code uses
    torch.manual_seed(seed)


def sample_rng(seed: int, epoch: int, position: int, stream: str = "sample") -> np.random.Generator:
    """Generator of one sample, or of one epoch's order: a pure function of its arguments (Philox, Salmon et al. 2011).

    Args:
        seed: the run's seed, not offset by rank.
        epoch, position: from 0, in the epoch's global order.
        stream: what the numbers are for; different streams are independent.
    """
    assert 0 <= position < 2**32 and 0 <= epoch < 2**24, (position, epoch)
    counter = (_STREAMS[stream] << 56) | (epoch << 32) | position
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, counter], np.uint64)))


def at_most(most: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Numbers from 0 to before `count`, ascending: all of them, or `most` that `rng` chooses."""
    if count <= most:
        return np.arange(count)
    return np.sort(rng.choice(count, most, replace=False, shuffle=False))
