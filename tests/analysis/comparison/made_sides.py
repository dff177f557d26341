"""Two made detectors on the same images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.comparison.differences import Differences, differences
from tessera.utils.evaluation.average_precision import Ranking
from tests.utils.evaluation.made_images import Image, make_image, ranked, share

NC = 3


def scene(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return boxes and classes of an image whose objects lie apart."""
    count = int(rng.integers(1, 7))
    corner = np.stack((np.arange(count) * 100.0, rng.uniform(0, 50, count)), 1)
    return np.concatenate((corner, corner + rng.uniform(30, 80, (count, 2))), 1), rng.integers(0, NC, count)


def detector(
    rng: np.random.Generator, scenes: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], skill: float
) -> list[Image]:
    """Return images on which objects are missed with the probability 1 - skill, with as many false positives."""
    images = []
    for boxes, classes in scenes:
        seen = rng.random(len(boxes)) < skill
        moved = boxes + rng.normal(0, 4, boxes.shape)
        wrong = boxes[~seen] + 1000
        scores = np.concatenate((rng.beta(4, 2, int(seen.sum())), rng.beta(2, 4, len(wrong))))
        order = np.argsort(-scores)
        found = np.concatenate((moved[seen], wrong))[order]
        kinds = np.concatenate((classes[seen], classes[~seen]))[order]
        images.append(make_image(found, scores[order], kinds, boxes, classes))
    return images


def two_sides(seed: int, images: int, skill_a: float, skill_b: float) -> tuple[list[Image], list[Image]]:
    rng = np.random.default_rng(seed)
    scenes = [scene(rng) for _ in range(images)]
    return detector(rng, scenes, skill_a), detector(rng, scenes, skill_b)


def compared(*pair: list[Image]) -> Differences:
    shares = [share(side) for side in pair]
    a, b = ([ranked([own])] for own in shares)
    return differences(a, b, (shares[0], shares[1]))


def ranking(images: list[Image]) -> Ranking:
    return ranked([share(images)])
