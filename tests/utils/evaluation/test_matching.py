"""IoU of detections and objects, where an ordinary division would not do."""

from __future__ import annotations

import numpy as np

from tessera.utils.evaluation.matching import pairwise_iou


def test_boxes_without_an_area_overlap_nothing() -> None:
    point = np.array([[5, 5, 5, 5], [0, 0, 10, 10]], np.float32)
    np.testing.assert_array_equal(pairwise_iou(point, point), [[0, 0], [0, 1]])


def test_labels_that_are_mapped_read_only_are_accepted() -> None:
    boxes = np.array([[0, 0, 10, 10]], np.float32)
    boxes.setflags(write=False)
    half = pairwise_iou(boxes, np.array([[0, 0, 10, 5]], np.float32))
    assert half.dtype == np.float64 and half.tolist() == [[0.5]]
    assert pairwise_iou(boxes, np.zeros((0, 4), np.float32)).shape == (1, 0)
