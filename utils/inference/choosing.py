"""`--label-next`: of pictures that nobody has labelled, those from which a detector would learn most.

A picture counts for how unsure the model is of what it finds there, more where that is of classes it seldom finds, and
for how little it resembles those that are chosen before it.

Legend: P pictures, F features, C classes, T = `MOST_UNSURE`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.inference.results import Result

FLOOR = 0.05  # scores from which on a find counts as one that the model is unsure of
MOST_UNSURE = 8  # finds of a picture that count
_HALF = 0.5  # what a picture's next find counts of the one before: ten of them are less than twice as much as one
_NOTHING = 0.1  # what a picture counts whose finds are all sure, or that has none: objects may be missed there
_RAREST = 2.0  # what a find of a rare class counts at most, and one of a common class at least half of


class Unsure(NamedTuple):
    """What the model is unsure of in a picture, the most unsure first; rows that are not used are 0 and class 0.

    Attributes:
        doubts: float16 (T,), entropy in bits, 0 … 1.
        classes: int32 (T,).
        found: float32 (C,), sum of scores of each class.
    """

    doubts: NDArray[np.float16]
    classes: NDArray[np.int32]
    found: NDArray[np.float32]


class Choice(NamedTuple):
    """A picture that is chosen.

    Attributes:
        place: among those that were given.
        score: that it was chosen by, `worth` times `distance`.
        worth: how unsure the model is of it, 0.1 … 2.1.
        distance: from the nearest picture chosen before it, 0 … 1; 1 for the first.
    """

    place: int
    score: float
    worth: float
    distance: float


def unsure_of(result: Result, limits: NDArray[np.float32]) -> Unsure:
    """What the model is unsure of.

    A find is in doubt where its score is near the limit at which the model's labels begin: the entropy (Shannon 1948)
    of the score as a probability, moved so that the limit is at one half.

    Args:
        result: with finds from `FLOOR` on.
        limits: float32 (C,), what the score of a sure find of each class exceeds.
    """
    scores, limit = result.scores.astype(np.float64), np.clip(limits[result.classes], FLOOR, 1 - FLOOR)
    chance = np.where(scores < limit, scores / (2 * limit), 0.5 + (scores - limit) / (2 * (1 - limit)))
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    doubts = -(chance * np.log2(chance) + (1 - chance) * np.log2(1 - chance))
    first = np.argsort(-doubts, kind="stable")[:MOST_UNSURE]
    kept, classes = np.zeros(MOST_UNSURE, np.float16), np.zeros(MOST_UNSURE, np.int32)
    kept[: len(first)], classes[: len(first)] = doubts[first], result.classes[first]
    found = np.bincount(result.classes, weights=scores, minlength=len(limits)).astype(np.float32)
    return Unsure(kept, classes, found)


def class_weights(found: NDArray[np.floating]) -> NDArray[np.float64]:
    """What doubts of each class count, (C,): by the root of how seldom it is found, from 1/2 to 2.

    Args:
        found: (C,), sum of scores in all pictures. Classes that are never found count as the rarest.
    """
    sums = np.asarray(found, np.float64)
    if not sums.any():
        return np.ones(len(sums))
    median = np.median(sums[sums > 0])
    weights: NDArray[np.float64] = np.clip(np.sqrt(median / np.maximum(sums, 1e-9)), 1 / _RAREST, _RAREST)
    return weights


def worths(
    doubts: NDArray[np.float16], classes: NDArray[np.int32], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What each picture is worth by what the model is unsure of, (P,), whatever is chosen beside it.

    Each further find counts half of the one before, so that a crowd is not worth more than a few hard objects.

    Args:
        doubts, classes: (P, T), as in `Unsure`.
        weights: (C,), of `class_weights`.
    """
    weighted = -np.sort(-doubts.astype(np.float64) * weights[classes], axis=1)
    shares = _HALF ** np.arange(1, doubts.shape[1] + 1)
    worth: NDArray[np.float64] = _NOTHING + weighted @ shares
    return worth


def choose(worth: NDArray[np.float64], features: NDArray[np.float16], count: int) -> list[Choice]:
    """The `count` pictures to label next, the best first: all, where there are no more.

    Greedy k-centres (Gonzalez 1985; Sener and Savarese 2018) in which each picture's distance, by the cosine of its
    features, counts as much as the picture is worth. Of equal ones the first goes first.

    Args:
        worth: (P,), above 0.
        features: (P, F).
    """
    points = features.astype(np.float32)
    points -= points.mean(0)
    points /= np.maximum(points.std(0), 1e-6)
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-6)
    nearest, left = np.ones(len(points)), np.ones(len(points), np.bool_)
    chosen: list[Choice] = []
    for number in range(min(count, len(points))):
        # Rounded, so that the order of a sum on another processor decides nothing but true ties.
        gains = np.where(left, np.round(worth * nearest, 5), -1)
        place = int(gains.argmax())
        chosen.append(Choice(place, float(gains[place]), float(worth[place]), float(nearest[place])))
        left[place] = False
        distance = np.maximum((1 - points @ points[place]) / 2, 0).astype(np.float64)
        nearest = distance if number == 0 else np.minimum(nearest, distance)
    return chosen
