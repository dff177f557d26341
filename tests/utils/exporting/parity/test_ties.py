"""Tests of NMS ties: either detection is right, and what is no NMS result of the candidates counts."""

from __future__ import annotations

import pytest

from tessera.models.nms import NmsSettings
from tessera.utils.exporting.parity.difference import EXACT
from tessera.utils.exporting.parity.trial import Candidates, without_ties
from tests.utils.exporting.made import found_rows

# Two boxes that overlap by two thirds with scores as good as equal, a third beside the second alone, one far away.
LEFT, RIGHT, FURTHER, ALONE = (
    (0, 0, 50, 50, 0.9, 0),
    (10, 0, 60, 50, 0.8999, 0),
    (24, 0, 74, 50, 0.7, 0),
    (200, 200, 250, 250, 0.6, 0),
)
WEAK = (0, 5, 50, 55, 0.5, 0)  # as good as on LEFT
Row = tuple[float, float, float, float, float, int]


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
