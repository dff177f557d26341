"""What a difference is where chance alone decides: A's and B's results are swapped on a random half of the images.

If A and B are equally good, it does not matter which of the two measured an image (a permutation test; Fisher 1935,
Good 2005). No swap changes which objects there are, so a class on two images has its few outcomes, and no more.

Scores of two models need not mean the same: one may be sure at 0.9, the other at 0.3. A detection enters with its place
among all of its side instead, which changes no side's average precision. Not with that in its class: of a rare class it
says too little, and more than 5 % of equal sides were told apart.

Legend: N images, C classes that have objects, D detections of a side, R rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import rank
from tessera.utils.evaluation.bootstrap import ClassPrecisions, chunks, class_precisions
from tessera.utils.evaluation.match_state import Accumulator, LastHits, MatchState
from tessera.utils.ranks.world import World

ROUNDS = 999  # with what was observed a thousand


def all_matches(found: Accumulator, world: World) -> list[MatchState]:
    """Every detection of every rank, a state a rank, on rank 0; all ranks call it.

    What a measurement leaves out, the detections below the last hit of their class, may lie above that of the other
    side.
    """
    last_hits = world.broadcast(LastHits.joined(world.gather(found.last_hits())))
    return world.gather(found.state(last_hits._replace(scores=np.zeros_like(last_hits.scores))))


def swapped_sides(
    a: Sequence[MatchState], b: Sequence[MatchState], rng: np.random.Generator
) -> tuple[ClassPrecisions, ClassPrecisions]:
    """Average precision of the two sides after each of `ROUNDS` swaps.

    Args:
        a, b: from `all_matches`, of the same images.
        rng: says which images are swapped.
    """
    images = np.concatenate([state.images for state in a])
    offset = int(images.max(initial=-1)) + 1
    ranking = rank([*_by_place(a), *(replace(state, images=state.images + offset) for state in _by_place(b))])
    assert ranking.n_images == 2 * len(images), "both sides are of the same images"
    swapped = rng.integers(2, size=(len(images), ROUNDS), dtype=np.uint8)

    def weights(of_b: int) -> Iterator[NDArray[np.float32]]:
        start = 0
        for size in chunks(ROUNDS):
            taken = swapped[:, start : start + size] ^ of_b  # 1 = the side's result on an image is B's
            yield np.concatenate((1 - taken, taken)).astype(np.float32)
            start += size

    return class_precisions(ranking, weights(0)), class_precisions(ranking, weights(1))


def _by_place(states: Sequence[MatchState]) -> list[MatchState]:
    """The states of a side with scores that say the place alone: 0, -1, -2 …"""
    classes = np.concatenate([np.repeat(np.arange(len(s.class_ids)), s.detection_counts) for s in states])
    images = np.concatenate([state.images[state.detection_images] for state in states])
    places = np.empty(len(images), np.float32)
    places[np.lexsort((images, classes, -np.concatenate([s.scores for s in states])))] = np.arange(len(images))
    ends = np.cumsum([len(state.scores) for state in states])[:-1]
    return [replace(state, scores=-own) for state, own in zip(states, np.split(places, ends), strict=True)]
