"""What a difference is where chance alone decides: A's and B's results are swapped on a random half of the images.

If A and B are equally good, it does not matter which of the two measured an image (a permutation test; Fisher 1935,
Good 2005). No swap changes which objects there are, so a class on two images has its few outcomes, and no more.

Scores of two models need not mean the same: one may be sure at 0.9, the other at 0.3. A detection enters with its place
among all of its side instead, which changes no side's average precision. Not with that in its class: of a rare class it
says too little, and more than 5 % of equal sides were told apart.

Legend: N images, C classes that have objects, D detections of a side, R rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import rank
from tessera.utils.evaluation.bootstrap import ClassPrecisions, chunks, class_precisions
from tessera.utils.evaluation.matches import Matches

ROUNDS = 999  # with what was observed a thousand


def swapped_sides(a: Matches, b: Matches, rng: np.random.Generator) -> tuple[ClassPrecisions, ClassPrecisions]:
    """Average precision of the two sides after each of `ROUNDS` swaps.

    Args:
        a, b: of the same images.
        rng: says which images are swapped.
    """
    images = a.images
    assert np.array_equal(images, b.images), "both sides are of the same images"
    offset = int(images.max(initial=-1)) + 1
    ranking = rank(Matches.joined([_by_place(a), _by_place(b)._replace(images=images + offset)]))
    swapped = rng.integers(2, size=(len(images), ROUNDS), dtype=np.uint8)

    def weights(of_b: int) -> Iterator[NDArray[np.float32]]:
        start = 0
        for size in chunks(ROUNDS):
            taken = swapped[:, start : start + size] ^ of_b  # 1 = the side's result on an image is B's
            yield np.concatenate((1 - taken, taken)).astype(np.float32)
            start += size

    return class_precisions(ranking, weights(0)), class_precisions(ranking, weights(1))


def _by_place(matches: Matches) -> Matches:
    """The matches of a side with scores that say the place alone: 0, -1, -2 …, of classes that have objects."""
    at = np.flatnonzero(np.isin(matches.classes, matches.target_classes))
    images = np.repeat(np.arange(len(matches.images)), matches.detection_counts)[at]
    scores = np.zeros_like(matches.scores)
    scores[at[np.lexsort((images, matches.classes[at], -matches.scores[at]))]] = -np.arange(len(at))
    return matches._replace(scores=scores)
