"""The confusion matrix."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.utils.evaluation.curves import summarize
from tests.utils.evaluation.made_images import Image, accumulate, errors_of, make_image, random_images


class TestConfusionMatrix:
    box = (0.0, 0.0, 10.0, 10.0)
    far = (50.0, 50.0, 60.0, 60.0)

    def count(self, *images: Image, nc: int = 2, confidence: float = 0.25) -> NDArray[np.int64]:
        return errors_of(list(images), nc, confidence).confusion.matrix

    def test_rows_are_predicted_columns_true(self) -> None:
        matrix = self.count(make_image([self.box], [0.9], [1], [self.box], [0]))
        assert matrix.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]

    def test_background(self) -> None:
        matrix = self.count(
            make_image([self.far], [0.9], [1], [self.box], [0]),  # a false positive and a miss
            make_image([self.box], [0.9], [0], [], []),  # a false positive on an image without labels
            make_image([], [], [], [self.box], [1]),  # a miss on an image without detections
        )
        assert matrix.tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]

    def test_thresholds(self) -> None:
        shifted = (0.0, 0.0, 10.0, 4.9)
        matrix = self.count(make_image([self.box, shifted], [0.24, 0.25], [0, 0], [self.box], [0]))
        assert matrix.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
        half = (0.0, 0.0, 10.0, 5.0)
        assert self.count(make_image([half], [0.25], [0], [self.box], [0])).tolist() == [[1, 0, 0], [0, 0, 0], [0] * 3]

    def test_an_object_and_a_detection_count_once(self) -> None:
        near = (0.0, 0.0, 10.0, 9.0)
        matrix = self.count(
            make_image([near, self.box, self.box], [0.9, 0.8, 0.3], [1, 0, 1], [self.box, near], [0, 0])
        )
        assert matrix.tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0]]

    def test_two_labels_of_one_box(self) -> None:
        matrix = self.count(make_image([self.box, self.box], [0.6, 0.4], [0, 1], [self.box], [1]))
        assert matrix.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0]]

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None)
    def test_its_sums_are_objects_and_detections_and_its_diagonal_precision_and_recall(self, seed: int) -> None:
        images = random_images(seed, 6, 3, coarse=True, crowded=True)
        metrics, curves = summarize(accumulate(images), 3)
        total = self.count(*images, nc=3, confidence=metrics.confidence)
        true = np.bincount(np.concatenate([c for _, _, c in images]), minlength=3)
        np.testing.assert_array_equal(total[:, :3].sum(0), true)
        sure = np.concatenate([d.classes.numpy()[d.scores.numpy() >= metrics.confidence] for d, _, _ in images])
        np.testing.assert_array_equal(total[:3].sum(1), np.bincount(sure, minlength=3))
        for c, precision, recall in zip(metrics.class_ids, *metrics.per_class.T[:2], strict=True):
            assert recall == total[c, c] / true[c]
            assert precision == (total[c, c] / total[c].sum() if total[c].any() else curves.precision[0, -1])
