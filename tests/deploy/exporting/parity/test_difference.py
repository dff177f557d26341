"""Tests of the matching of detections, of the thresholds that may cut them, and of NMS ties."""

from __future__ import annotations

import pytest

from tessera.deploy.exporting.difference import EXACT, Candidates, OutputDifference, compare, without_ties
from tessera.models.nms import NmsSettings
from tessera.utils.types import Detections
from tests.deploy.exporting.made import found_rows

Row = tuple[float, float, float, float, float, int]
CAT, DOG = (10, 10, 50, 50, 0.9, 0), (12, 10, 50, 50, 0.8, 1)
FLAT = [(10, 0, 40, 0, 0.9, 0), (10, 0, 40, 0, 0.7, 0)]


def compared(a: Detections, b: Detections, max_det: int = 300, scale: float = 1.0) -> OutputDifference:
    return compare(a, b, conf=0.1, max_det=max_det, scale=scale, margin=2e-3)


def apart(score: float, left: float = 300) -> Row:
    return (left, 300, left + 40, 340, score, 0)


def test_differences_are_in_pixels_of_the_network() -> None:
    found = compared(found_rows(CAT), found_rows((10, 10.5, 50, 50, 0.88, 0)), scale=0.25)
    assert found.largest == pytest.approx((0.125, 0.02), abs=1e-6)
    boxes, scores = found.exceeds(EXACT).split("; ")
    assert (
        "boxes differ by 0.125 px in the median, expected at most 0.01" in boxes and "scores differ by 0.02" in scores
    )
    assert found.exceeds(EXACT._replace(box_px=0.1)).startswith("boxes differ by up to 0.125 px, expected at most 0.1")


@pytest.mark.parametrize(
    ("reference", "found", "max_det", "counts"),
    [
        ([CAT, DOG, apart(0.5)], [CAT, DOG, apart(0.5)], 300, (6, 6)),
        ([CAT, DOG], [(10, 10, 50, 50, 0.9, 1), (90, 10, 130, 50, 0.8, 1)], 300, (4, 2)),  # the dog with the box on it
        (FLAT, FLAT, 300, (4, 4)),  # boxes without an area
        ([CAT, apart(0.101)], [CAT], 300, (2, 2)),  # near the threshold
        ([CAT, apart(0.11)], [CAT], 300, (3, 2)),
        ([CAT, apart(0.5)], [CAT, apart(0.4995, 400)], 2, (2, 2)),  # one of two that nearly tie
        ([CAT, apart(0.5)], [CAT, apart(0.4995, 400)], 3, (4, 2)),
        ([CAT], [CAT, apart(0.05)], 300, (3, 2)),  # below the threshold
        ([CAT], [CAT, apart(0.6)], 1, (3, 2)),  # more than were asked for
        ([], [], 300, (0, 0)),
        ([], [CAT], 300, (1, 0)),
        ([CAT], [], 300, (1, 0)),
    ],
)
def test_which_detections_count(reference: list[Row], found: list[Row], max_det: int, counts: tuple[int, int]) -> None:
    difference = compared(found_rows(*reference), found_rows(*found), max_det)
    assert (difference.detections, difference.matched) == counts
    assert bool(difference.exceeds(EXACT)) == (counts[0] != counts[1])


# Two boxes that overlap by two thirds with scores as good as equal, a third beside the second alone, one far away.
LEFT, RIGHT, FURTHER, ALONE = (
    (0, 0, 50, 50, 0.9, 0),
    (10, 0, 60, 50, 0.8999, 0),
    (24, 0, 74, 50, 0.7, 0),
    (200, 200, 250, 250, 0.6, 0),
)
WEAK = (0, 5, 50, 55, 0.5, 0)  # as good as on LEFT


def left(reference: list[Row], found: list[Row], max_det: int = 300) -> tuple[int, int]:
    everything = found_rows(LEFT, RIGHT, FURTHER, ALONE, WEAK)
    rules = NmsSettings(0.1, 0.5, max_det)
    rest = without_ties(
        found_rows(*reference), found_rows(*found), Candidates(everything, everything), rules, 1.0, EXACT
    )
    return len(rest[0]), len(rest[1])


def test_one_of_two_equals_and_what_follows_from_it_do_not_count() -> None:
    assert left([LEFT, FURTHER, ALONE], [RIGHT, ALONE]) == (1, 1)
    assert left([RIGHT, ALONE], [LEFT, FURTHER, ALONE]) == (1, 1)
    assert left([LEFT, ALONE], [RIGHT], max_det=1) == (0, 0), "beyond the last that is allowed"
    assert left([LEFT], [LEFT, ALONE], max_det=1) == (1, 2), "more than were asked for"


@pytest.mark.parametrize(
    ("reference", "found", "rest"),
    [
        ([LEFT, FURTHER, ALONE], [LEFT, FURTHER], (3, 2)),  # nothing suppresses it
        ([LEFT, FURTHER, ALONE], [LEFT, RIGHT, FURTHER, ALONE], (3, 4)),  # both of two that compete
        ([LEFT, ALONE], [WEAK, ALONE], (2, 1)),  # a weaker one in its place
        ([LEFT, ALONE], [(3, 3, 53, 53, 0.9, 0), ALONE], (2, 2)),  # no candidate
        ([LEFT, ALONE], [(10, 0, 60, 50, 0.8999, 1), ALONE], (2, 2)),  # of another class
        ([], [ALONE], (0, 0)),  # of the thresholds, which the comparison looks at
    ],
)
def test_what_is_no_suppression_of_the_candidates_counts(
    reference: list[Row], found: list[Row], rest: tuple[int, int]
) -> None:
    assert left(reference, found) == rest
