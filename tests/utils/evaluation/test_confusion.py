"""The confusion matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.evaluation.curves import summarize
from tests.utils.evaluation.made_images import Image, accumulate, errors_of, make_image, matrix_of, random_images

BOX, NEAR, HALF, BELOW_HALF = ((0.0, 0.0, 10.0, side) for side in (10.0, 9.0, 5.0, 4.9))
FAR = (50.0, 50.0, 60.0, 60.0)
BACKGROUND = (
    make_image([FAR], [0.9], [1], [BOX], [0]),  # a false positive and a missed object
    make_image([BOX], [0.9], [0], [], []),
    make_image([], [], [], [BOX], [1]),
)


@pytest.mark.parametrize(
    ("images", "matrix"),
    [
        ((make_image([BOX], [0.9], [1], [BOX], [0]),), [[0, 0, 0], [1, 0, 0], [0, 0, 0]]),
        (BACKGROUND, [[0, 0, 1], [0, 0, 1], [1, 1, 0]]),
        ((make_image([BOX, BELOW_HALF], [0.24, 0.25], [0, 0], [BOX], [0]),), [[0, 0, 1], [0, 0, 0], [1, 0, 0]]),
        ((make_image([HALF], [0.25], [0], [BOX], [0]),), [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (  # an object and a detection count once
            (make_image([NEAR, BOX, BOX], [0.9, 0.8, 0.3], [1, 0, 1], [BOX, NEAR], [0, 0]),),
            [[1, 0, 0], [1, 0, 1], [0, 0, 0]],
        ),
        ((make_image([BOX, BOX], [0.6, 0.4], [0, 1], [BOX], [1]),), [[0, 0, 1], [0, 1, 0], [0, 0, 0]]),
    ],
)
def test_rows_are_predicted_columns_true(images: tuple[Image, ...], matrix: list[list[int]]) -> None:
    assert matrix_of(errors_of(list(images), 2, 0.25)).tolist() == matrix


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_its_sums_are_objects_and_detections_and_its_diagonal_precision_and_recall(seed: int) -> None:
    images = random_images(seed, 6, 3, coarse=True, crowded=True)
    metrics, curves = summarize(accumulate(images), 3)
    total = matrix_of(errors_of(images, 3, metrics.confidence))
    true = np.bincount(np.concatenate([c for _, _, c in images]), minlength=3)
    np.testing.assert_array_equal(total[:, :3].sum(0), true)
    sure = np.concatenate([d.classes.numpy()[d.scores.numpy() >= metrics.confidence] for d, _, _ in images])
    np.testing.assert_array_equal(total[:3].sum(1), np.bincount(sure, minlength=3))
    for c, precision, recall in zip(metrics.class_ids, *metrics.per_class.T[:2], strict=True):
        assert recall == total[c, c] / true[c]
        assert precision == (total[c, c] / total[c].sum() if total[c].any() else curves.precision[0, -1])
