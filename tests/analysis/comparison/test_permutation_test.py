"""p-values against SciPy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tessera.analysis.comparison.differences import (
    LEVEL,
    holm,
    images_needed,
    permutation_half_width,
    permutation_p_value,
    student_quantile,
    student_tail,
)


def test_holm_by_hand() -> None:
    """0.01 · 4, 0.02 · 3, 0.03 · 2 = 0.06 as the one before it, and never above 1 nor below one that is smaller."""
    np.testing.assert_allclose(holm(np.array([0.03, 0.01, 0.9, 0.02])), [0.06, 0.04, 0.9, 0.06])
    np.testing.assert_allclose(holm(np.array([0.5, 0.4, 0.6])), [1.0, 1.0, 1.0])
    assert holm(np.array([0.04])).tolist() == [0.04] and holm(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 127, 4999, 99_999])
def test_students_t_is_scipys(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.0, 4.0, 8.0):
        assert student_tail(t, freedom) == student_tail(-t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), 1e-4)
    for level in (0.5, 0.05, 0.001):
        assert student_quantile(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), 1e-6)


def test_a_difference_is_its_share_of_the_rounds_and_beyond_them_the_normal_tail() -> None:
    rng = np.random.default_rng(0)
    swapped = rng.normal(0, 0.01, 999)
    extreme = int((np.abs(swapped) >= 0.015).sum())
    assert permutation_p_value(0.015, swapped, 100) == permutation_p_value(-0.015, swapped, 100) == (1 + extreme) / 1000
    assert permutation_p_value(0.05, swapped, 100) == pytest.approx(
        2 * stats.norm.sf(0.05 / np.sqrt((swapped**2).mean())), 1e-9
    )
    assert permutation_p_value(0.05, swapped, 6) == 1 / 1000, "six images have 64 outcomes: what was counted stands"
    assert permutation_p_value(0.05, swapped, 12) == 2**-11
    assert permutation_p_value(0.0, np.zeros(999), 100) == 1


def test_what_chance_reaches_is_where_p_is_5_percent() -> None:
    swapped = np.random.default_rng(1).normal(0, 1, (4, 999))
    for rounds, reach in zip(swapped, permutation_half_width(swapped), strict=True):
        assert permutation_p_value(reach, rounds, 100) >= LEVEL > permutation_p_value(reach * (1 + 1e-6), rounds, 100)


def test_images_needed() -> None:
    """The standard error of 128 images is .01: to see .028 takes as many, to see .0028 a hundred times as many."""
    size = 0.01 * (stats.norm.isf(0.025) + stats.norm.isf(0.2))
    assert images_needed(size * 1.0001, 128, 1e-4, 0) == 128
    assert images_needed(size / 10 * 1.0001, 128, 1e-4, 0) == pytest.approx(12_800, abs=5)
    assert images_needed(size, 128, 1e-4, 1.01e-4) is None, "the trainings alone differ by as much"
    assert (images_needed(size, 128, 1e-4, 5e-5) or 0) == pytest.approx(256, abs=1)
