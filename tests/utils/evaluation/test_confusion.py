"""The confusion matrix."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.utils.evaluation.confusion import ConfusionMatrix
from tests.utils.evaluation.made_images import Image, make_image, random_images


class TestConfusionMatrix:
    box = (0.0, 0.0, 10.0, 10.0)
    far = (50.0, 50.0, 60.0, 60.0)

    def count(self, *images: Image, nc: int = 2) -> NDArray[np.int64]:
        confusion = ConfusionMatrix(nc)
        for image in images:
            confusion.add(*image)
        return confusion.matrix

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
        shifted = (0.0, 0.0, 10.0, 4.5)  # IoU 0.45 exactly is not above it
        matrix = self.count(make_image([self.box, shifted], [0.24, 0.25], [0, 0], [self.box], [0]))
        assert matrix.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]

    def test_pairs_by_iou_each_once(self) -> None:
        near = (0.0, 0.0, 10.0, 9.0)
        matrix = self.count(
            make_image([near, self.box, self.box], [0.9, 0.8, 0.3], [1, 0, 1], [self.box, near], [0, 0])
        )
        assert matrix.tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0]]

    def test_two_labels_of_one_box(self) -> None:
        matrix = self.count(make_image([self.box, self.box], [0.4, 0.6], [0, 1], [self.box], [1]))
        assert matrix.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0]]

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=20, deadline=None)
    def test_sums_over_images_and_shares_of_ranks(self, seed: int) -> None:
        images = random_images(seed, 6, 3, coarse=True, crowded=True)
        total = self.count(*images, nc=3)
        np.testing.assert_array_equal(self.count(*images[::2], nc=3) + self.count(*images[1::2], nc=3), total)
        true = np.bincount(np.concatenate([c for _, _, c in images]), minlength=3)
        np.testing.assert_array_equal(total[:, :3].sum(0), true)
        sure = np.concatenate([d.classes.numpy()[d.scores.numpy() >= 0.25] for d, _, _ in images])
        np.testing.assert_array_equal(total[:3].sum(1), np.bincount(sure, minlength=3))
