"""The best confidence of an F1 curve, and the thresholds that detection takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.utils.evaluation.curves import best_step, smooth
from tessera.utils.evaluation.matching import CONFIDENCES
from tessera.utils.thresholds import class_thresholds, detection_threshold

FIRST = 50  # the first of CONFIDENCES that is a threshold
Scores = st.lists(st.floats(0.001, 0.999), min_size=1, max_size=12)


def f1_of(true: list[float], false: list[float], objects: int) -> NDArray[np.float64]:
    """F1 of detections with these scores, counted at each confidence."""
    hits, wrong = (
        np.sum(np.array(scores)[:, None] >= CONFIDENCES, 0) if scores else np.zeros(1000) for scores in (true, false)
    )
    return 2 * hits / (hits + wrong + objects)


@given(true=Scores, false=st.one_of(st.just([]), Scores), more=st.integers(0, 5))
def test_the_best_is_the_middle_of_the_longest_plateau(true: list[float], false: list[float], more: int) -> None:
    f1 = f1_of(true, false, len(true) + more)
    best, start = best_step(f1), FIRST if f1[FIRST:].any() else 1
    smoothed = smooth(f1[start:], 50)
    highest = smoothed > smoothed.max() - 1e-9
    at = best - start
    assert at >= 0 and highest[at]
    lengths = [0, *np.flatnonzero(~highest), len(highest)]
    left, right = (int(np.argmin(np.append(side, False))) for side in (highest[at::-1], highest[at:]))
    assert left - right in (0, 1), "as far from one end as from the other"
    assert left + right - 1 >= max(np.diff(lengths)) - 1, "no plateau is longer"


@given(weakest=st.floats(0.2, 0.95), strong=Scores)
def test_a_detector_without_errors_has_the_middle_between_the_floor_and_its_weakest(
    weakest: float, strong: list[float]
) -> None:
    true = [weakest, *(max(score, weakest) for score in strong)]
    assert CONFIDENCES[best_step(f1_of(true, [], len(true)))] == pytest.approx(weakest / 2, abs=0.002)
    # One weak hit more raises F1 below 0.05 alone, which no threshold follows.
    assert CONFIDENCES[best_step(f1_of([*true, 0.04], [], len(true) + 1))] == pytest.approx(weakest / 2, abs=0.002)


def test_low_scores_and_unmeasured_confidences() -> None:
    low = best_step(f1_of([0.01, 0.02], [0.003], 2))
    assert 0 < CONFIDENCES[low] < 0.02, "F1 is 0 from 0.05 on"
    assert best_step(np.zeros(1000)) == best_step(np.zeros(1000), 0.001) == 1
    perfect = f1_of([0.9], [], 1)
    assert CONFIDENCES[best_step(perfect, 0.6)] == pytest.approx((0.6 + 0.85) / 2, abs=0.002)
    assert best_step(perfect, 1.0) == 999


def test_detection_takes_no_low_threshold() -> None:
    assert [detection_threshold(best) for best in (None, 0.0, 0.049, 0.05, 0.9)] == [0.25, 0.25, 0.25, 0.05, 0.9]
    assert class_thresholds((0.0, 0.4, 0.01), 0.3) == (0.3, 0.4, 0.3) and class_thresholds((), 0.3) == ()


def test_smooth_keeps_a_constant_and_its_length() -> None:
    np.testing.assert_allclose(smooth(np.full(1000, 0.3), 50), np.full(1000, 0.3))
    spike = np.eye(1, 1000, 500)[0]
    assert smooth(spike, 50).shape == (1000,) and smooth(spike, 50).max() == pytest.approx(1 / 101)
