"""Sizes of a dataset's boxes, all of them or a sample."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.utils.training import data
from tests.data.made_index import make_index


def test_box_sizes_are_all_or_a_sample_that_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = [[0] * int(count) for count in rng.integers(0, 4, 300)]  # some images without any
    index = make_index([tuple(size) for size in rng.integers(20, 900, (300, 2)).tolist()], classes=labels)
    scale = (640 / index.sizes_hw.max(1)).repeat(np.diff(index.box_offsets))
    every = (index.boxes_xyxy[:, 2:] - index.boxes_xyxy[:, :2]) * scale[:, None]
    np.testing.assert_array_equal(data.box_sizes(index, 640), every)
    monkeypatch.setattr(data, "MOST_SIZES", len(every))
    np.testing.assert_array_equal(data.box_sizes(index, 640), every)
    monkeypatch.setattr(data, "MOST_SIZES", 100)
    sample = data.box_sizes(index, 640)
    assert sample.shape == (100, 2) and {*map(tuple, sample)} <= {*map(tuple, every)}
    np.testing.assert_array_equal(sample, data.box_sizes(index, 640))
    assert abs(sample.mean() / every.mean() - 1) < 0.2
