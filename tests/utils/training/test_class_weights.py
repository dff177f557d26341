"""Class weights: values by hand, and properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.utils.config import Hyp, load_hyp
from tessera.utils.errors import ConfigError
from tessera.utils.training.data import by_effective_number, class_weights
from tests.data.made_index import make_index

PLAIN = load_hyp("hyp.scratch-low.yaml")  # classes are circle, square, star
AUTO = dataclasses.replace(PLAIN, class_weights="auto")
NAMED = dataclasses.replace(PLAIN, class_weights='{"star": 4.0, "circle": 0.5}')
INDEX = make_index([(10, 10)] * 3, classes=[[0, 0, 0, 0], [0, 0, 1, 1], [2, 2]])


def test_by_hand() -> None:
    assert class_weights(PLAIN, INDEX) is None
    named = class_weights(NAMED, INDEX)
    assert named is not None and named.dtype.is_floating_point
    mean = (6 * 0.5 + 2 * 1 + 2 * 4) / 10
    np.testing.assert_allclose(named, np.array([0.5, 1, 4]) / mean, rtol=1e-6)
    auto = class_weights(AUTO, INDEX)
    assert auto is not None
    np.testing.assert_allclose(auto, np.array([1 / 6, 1 / 2, 1 / 2]) / 0.3, rtol=0.005)  # so few: one over the number


def test_the_effective_number_is_the_number_of_a_few_and_a_thousand_of_many() -> None:
    numbers = 1 / by_effective_number(np.array([0, 1, 2, 1000, 10**6, 10**9]))
    np.testing.assert_allclose(numbers, [1, 1, 1.999, 1000 * (1 - 0.999**1000), 1000, 1000])


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8), st.sampled_from([AUTO, NAMED]))
def test_their_mean_over_the_objects_is_1(classes: list[list[int]], hyp: Hyp) -> None:
    index = make_index([(10, 10)] * len(classes), classes=classes)
    found = class_weights(hyp, index)
    assert found is not None and (found > 0).all() and found.isfinite().all()
    if len(index.classes):
        assert found[index.classes].mean().item() == pytest.approx(1, rel=1e-5)


def test_an_unknown_class() -> None:
    hyp = dataclasses.replace(PLAIN, class_weights='{"stars": 4.0}')
    with pytest.raises(ConfigError, match=r"no class 'stars'\. Did you mean 'star'\? Its classes: 'circle', 'squ"):
        class_weights(hyp, INDEX)
