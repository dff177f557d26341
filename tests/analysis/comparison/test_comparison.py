"""Disagreements of two sides by hand, and their detections against single validations."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.analysis.comparison.comparison import SHOWN, ImageResult, detections_above, find_disagreements
from tessera.utils.evaluation.matching import match_image
from tessera.utils.types import Detections
from tests.data.made_index import make_index
from tests.utils.evaluation.made_images import random_images, random_regions, share


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_results_are_the_matches_of_a_validation(seed: int) -> None:
    """They are those of the detections that reach the threshold alone, also with ties."""
    images = random_images(seed, 3, 3, coarse=True, crowded=True)
    regions = random_regions(images, seed, 3)
    results = detections_above(share(images, regions=regions), 0.5)
    assert list(results) == [0, 1, 2]
    for number, (detections, boxes, classes) in enumerate(images):
        sure = detections.scores >= 0.5
        kept = Detections(detections.boxes_xyxy[sure], detections.scores[sure], detections.classes[sure])
        alone, own = match_image(kept, boxes, classes, regions[number]), results[number]
        correct = alone.correct & 1 == 1
        assert own.found.sum() == correct.sum() and len(own.found) == len(classes)
        np.testing.assert_array_equal(own.wrong, ~correct & (alone.ignored & 1 == 0))
        np.testing.assert_array_equal(own.boxes_xyxy, alone.boxes_xyxy)


def found(index: int, *objects: int, wrong: int = 0, at: float = 300.0) -> ImageResult:
    """Return the detections of the given objects, and some false positives far from them, on an image of `INDEX`."""
    classes, boxes = INDEX.labels(index)
    far = np.array([[at + 50 * i, at, at + 50 * i + 40, at + 40] for i in range(wrong)], np.float32).reshape(-1, 4)
    kinds = np.concatenate((classes[list(objects)], np.zeros(wrong, np.int32)))
    detections = Detections(
        torch.from_numpy(np.concatenate((boxes[list(objects)], far))),
        torch.linspace(0.9, 0.5, len(kinds)),
        torch.from_numpy(kinds).long(),
    )
    return detections_above(match_image(detections, boxes, classes, image=index), 0.0)[index]


INDEX = make_index([(400, 400)] * 30, classes=[[0, 1, 2]] * 30)


def test_disagreements_by_hand() -> None:
    """Image 3 is worse by an object and two false positives, image 5 better by one, image 7 is both."""
    a, b = ({image: found(image, 0, 1) for image in range(30)} for _ in range(2))
    b[3] = found(3, 0, wrong=2)
    b[5] = found(5, 0, 1, 2)
    a[7], b[7] = found(7, 0, 1, wrong=1), found(7, 1, 2, wrong=1)
    a[9], b[9] = found(9, 0, 1, wrong=1), found(9, 0, 1, wrong=1, at=305)  # IoU above 0.5
    result = find_disagreements(a, b, INDEX, 0.3, 0.4)
    assert (result.both, result.lost, result.gained, result.neither) == (58, 2, 2, 28)
    assert result.both + result.lost + result.gained + result.neither == len(INDEX.classes)
    assert (result.wrong_both, result.wrong_a, result.wrong_b) == (2, 0, 2)
    assert result.lost_of_class.tolist() == [1, 1, 0] and result.gained_of_class.tolist() == [0, 0, 2]
    assert [one.image for one in result.worse] == [3] and [one.image for one in result.better] == [5]
    assert result.worse[0].lost.tolist() == [1] and len(result.worse[0].wrong_b) == 2
    back = find_disagreements(b, a, INDEX, 0.4, 0.3)
    assert (back.lost, back.gained, back.wrong_a, back.wrong_b) == (2, 2, 2, 0)
    assert [one.image for one in back.worse] == [5] and [one.image for one in back.better] == [3]


def test_few_images_are_shown_and_the_worst_come_first() -> None:
    a = {image: found(image, 0, 1, 2) for image in range(30)}
    b = {image: found(image, 0, 1, wrong=image % 15) for image in range(30)}
    result = find_disagreements(a, b, INDEX, 0.25, 0.25)
    assert [one.image for one in result.worse] == [14, 29, 13, 28, 12, 27, 11, 26] and len(result.worse) == SHOWN
    assert result.better == () and find_disagreements(a, a, INDEX, 0.25, 0.25).worse == ()
