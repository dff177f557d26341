"""What is chosen to be labelled next: doubts near the limit, rare classes, no crowd for its number, no two alike."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.utils.inference.choosing import choose, class_weights, unsure_of, worths
from tessera.utils.inference.results import Result

LIMITS = np.array([0.4, 0.4], np.float32)


def worth_of(scores: list[float], classes: list[int] | None = None, found: tuple[float, float] = (1, 1)) -> float:
    count = len(scores)
    boxes = np.zeros((count, 4), np.float32)
    ids = np.array(classes or [0] * count, np.int64)
    result = Result(boxes, np.array(scores, np.float32), ids, ("a", "b"), "x.jpg", (9, 9))
    unsure = unsure_of(result, LIMITS)
    (worth,) = worths(unsure.doubts[None], unsure.classes[None], class_weights(np.array(found)))
    return float(worth)


def test_a_score_at_the_limit_is_worth_most_and_a_sure_one_nothing() -> None:
    values = [worth_of([score]) for score in (0.05, 0.2, 0.4, 0.7, 0.99)]
    assert max(values) == values[2] == pytest.approx(0.1 + 0.5, abs=1e-3)
    assert values[4] < 0.15 and worth_of([]) == pytest.approx(0.1)


def test_a_crowd_is_worth_less_than_twice_an_object() -> None:
    assert worth_of([0.4] * 500) - 0.1 < 2 * (worth_of([0.4]) - 0.1)


def test_doubts_of_rare_classes_count_more_within_bounds() -> None:
    assert class_weights(np.array([100.0, 1.0, 0.0, 1e9])).tolist() == [1.0, 2.0, 2.0, 0.5]
    assert class_weights(np.zeros(3)).tolist() == [1.0] * 3
    rare, common = (worth_of([0.4], [c], (1000, 10)) for c in (1, 0))
    assert rare > 1.5 * common


def test_of_pictures_that_are_alike_one_is_chosen_before_all_others() -> None:
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(5, 16))
    features = np.repeat(kinds, 10, 0) + 0.01 * rng.normal(size=(50, 16))
    worth = 1 - 0.01 * np.arange(50)
    chosen = choose(worth, features.astype(np.float16), 5)
    assert sorted(choice.place // 10 for choice in chosen) == [0, 1, 2, 3, 4] and chosen[0].place == 0
    assert choose(worth, features.astype(np.float16), 5) == chosen
    assert len(choose(worth, features.astype(np.float16), 80)) == 50
    assert len({choice.place for choice in choose(worth, features.astype(np.float16), 80)}) == 50


def test_equal_pictures_without_worth_of_their_own_are_taken_in_their_order() -> None:
    chosen = choose(np.full(4, 0.1), np.ones((4, 8), np.float16), 3)
    assert [choice.place for choice in chosen] == [0, 1, 2]
