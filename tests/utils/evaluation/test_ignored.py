"""Ignored regions count neither for nor against a detector, as in pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.matching import Regions, match_image
from tests.utils.evaluation.coco_oracle import assert_equals_coco
from tests.utils.evaluation.made_images import (
    accumulate,
    errors_of,
    make_image,
    matrix_of,
    random_images,
    random_regions,
)

BOX = [0.0, 0.0, 10.0, 10.0]


def region(classes: list[int], boxes: list[list[float]]) -> Regions:
    return np.array(classes, np.int32), np.array(boxes, np.float32).reshape(-1, 4)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 12), nc=st.integers(1, 5), coarse=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_pycocotools(seed: int, n: int, nc: int, coarse: bool) -> None:
    images = random_images(seed, n, nc, coarse=coarse, crowded=seed % 2 == 0)
    assert_equals_coco(images, nc, random_regions(images, seed, nc))


def test_a_detection_takes_an_object_before_a_region() -> None:
    image = make_image([BOX, [2, 2, 8, 8], [20, 20, 30, 30]], [0.9, 0.8, 0.7], [0, 0, 0], [BOX], [0])
    found = match_image(*image, region([0], [[0, 0, 25, 30]]))
    assert found.correct[0].all() and not found.correct[1:].any()
    assert found.in_regions.tolist() == [10, 10, 1], "the whole box, the whole box, half of it"
    other = match_image(*image, region([1], [[0, 0, 25, 30]]))
    assert not other.in_regions.any(), "of another class"
    of_any = match_image(*image, region([-1, 1], [[0, 0, 25, 30], [0, 0, 90, 90]]))
    assert of_any.in_regions.tolist() == found.in_regions.tolist()


def test_precision_and_the_confusion_matrix_leave_out_what_is_in_a_region() -> None:
    image = make_image([BOX, [20, 20, 30, 30], [20, 20, 30, 30]], [0.5, 0.9, 0.9], [0, 0, 1], [BOX], [0])
    of_class, of_any = (region([c], [[15, 15, 90, 90]]) for c in (0, -1))
    alone, among = (summarize(accumulate([image], regions), 2)[0] for regions in ((), [of_class]))
    assert alone.map50 == alone.precision == pytest.approx(0.5)
    assert among.map50 == among.precision == among.recall == 1
    matrices = [matrix_of(errors_of([image], 2, regions=[own])).tolist() for own in (of_class, of_any)]
    assert matrices == [[[1, 0, 0], [0, 0, 1], [0, 0, 0]], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]]
