"""Detections are matched by class and place, and those that a threshold may cut do not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.exporting.parity.difference import EXACT, Difference, compare, joined
from tessera.utils.types import Detections
from tests.utils.exporting.made import found_rows


def compared(a: Detections, b: Detections, conf: float = 0.1, max_det: int = 300, scale: float = 1.0) -> Difference:
    return compare(a, b, conf=conf, max_det=max_det, scale=scale, margin=2e-3)


CAT, DOG = (10, 10, 50, 50, 0.9, 0), (12, 10, 50, 50, 0.8, 1)


def test_the_same_detections_agree_in_any_order_of_equal_scores() -> None:
    a, b = found_rows(CAT, DOG, (200, 0, 220, 9, 0.5, 0)), found_rows(CAT, DOG, (200, 0, 220, 9, 0.5, 0))
    found = compared(a, b)
    assert (found.detections, found.matched, *found.largest) == (6, 6, 0, 0)


def test_differences_are_in_pixels_of_the_network() -> None:
    found = compared(found_rows(CAT), found_rows((10, 10.5, 50, 50, 0.88, 0)), scale=0.25)
    assert found.largest == pytest.approx((0.125, 0.02), abs=1e-6)
    assert found.exceeds(EXACT) == (
        "half of the boxes differ by more than 0.125 px, at most 0.01 is allowed; "
        "half of the scores differ by more than 0.02, at most 0.0001 is allowed"
    )
    assert found.exceeds(EXACT._replace(box_px=0.1)).startswith("boxes differ by up to 0.125 px, at most 0.1")


def test_another_class_and_another_place_are_no_partners() -> None:
    found = compared(found_rows(CAT, DOG), found_rows((10, 10, 50, 50, 0.9, 1), (90, 10, 130, 50, 0.8, 1)))
    assert (found.detections, found.matched) == (4, 2), "the dog with the box on it"
    assert "50.0% of the detections are found by both" in found.exceeds(EXACT)


def test_boxes_without_an_area_have_partners() -> None:
    flat = (10, 0, 40, 0, 0.9, 0), (10, 0, 40, 0, 0.7, 0)
    assert compared(found_rows(*flat), found_rows(*flat)).share == 1


def test_what_a_threshold_may_cut_does_not_count() -> None:
    weak = (300, 300, 340, 340, 0.101, 0)
    assert compared(found_rows(CAT, weak), found_rows(CAT))[:2] == (2, 2)
    assert compared(found_rows(CAT, (300, 300, 340, 340, 0.11, 0)), found_rows(CAT)).share < 1
    last, other = (300, 300, 340, 340, 0.5, 0), (400, 300, 440, 340, 0.4995, 0)
    assert compared(found_rows(CAT, last), found_rows(CAT, other), max_det=2).share == 1, "one of two that nearly tie"
    assert compared(found_rows(CAT, last), found_rows(CAT, other), max_det=3).share < 1


def test_what_a_threshold_should_have_cut_counts() -> None:
    weak, more = (300, 300, 340, 340, 0.05, 0), (400, 300, 440, 340, 0.6, 0)
    assert compared(found_rows(CAT), found_rows(CAT, weak)).share < 1
    assert compared(found_rows(CAT), found_rows(CAT, more), max_det=1).share < 1


def test_nothing_agrees_with_nothing_and_not_with_something() -> None:
    assert compared(found_rows(), found_rows()).share == 1 and not compared(found_rows(), found_rows()).exceeds(EXACT)
    assert compared(found_rows(), found_rows(CAT)).exceeds(EXACT) and compared(found_rows(CAT), found_rows()).exceeds(
        EXACT
    )
    assert joined([compared(found_rows(), found_rows(CAT)), compared(found_rows(CAT), found_rows(CAT))])[:2] == (3, 2)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_it_does_not_matter_which_is_the_reference(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)

    def sampled() -> Detections:
        corner = rng.uniform(0, 60, (count, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(5, 40, (count, 2))], 1)
        scores = -np.sort(-rng.uniform(0.1, 1, count))
        return Detections(
            torch.from_numpy(boxes).float(),
            torch.from_numpy(scores).float(),
            torch.from_numpy(rng.integers(0, 3, count)),
        )

    a, b = sampled(), sampled()
    one, other = compared(a, b), compared(b, a)
    assert one.matched % 2 == 0 and one.matched <= one.detections <= 2 * count
    assert (one.detections, one.matched) == pytest.approx((other.detections, other.matched), abs=2 * count // 10 + 2)
