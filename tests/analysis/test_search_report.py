"""Verdict of a search: significant gains are detected, chance rarely passes, diverged sets are excluded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tessera.analysis.search_report import Gain, critical, gains, judge, page, verdict

SEARCHES, TRIALS, SETS, SEEDS, NOISE, BY_SEED = 1000, 20, 3, 3, 0.01, 0.02


def verdicts(gain: float, rng: np.random.Generator) -> tuple[float, float, float]:
    """Fractions of searches with a "better" set: by the best trial, by twice the standard error, by the verdict.

    One trial in ten gains `gain`.
    """
    naive = twice = better = 0
    for _ in range(SEARCHES):
        worth = np.zeros(TRIALS)
        worth[1::10] = gain
        search = worth + rng.normal(0, NOISE, TRIALS)
        best = 1 + np.argsort(-search[1:])[:SETS]
        again = np.concatenate(([0.0], worth[best]))[:, None] + rng.normal(0, BY_SEED, SEEDS)
        again = again + rng.normal(0, NOISE, again.shape)
        differences = again[1:] - again[0]
        naive += search[1:].max() > search[0]
        errors = differences.std(1, ddof=1) / np.sqrt(SEEDS)
        twice += bool((differences.mean(1) > 2 * errors).any())
        found = gains(again[0], again[1:])
        better += any(gain.is_better for gain in found)
        assert [gain.mean for gain in found] == pytest.approx(differences.mean(1))
    return naive / SEARCHES, twice / SEARCHES, better / SEARCHES


def test_a_gain_of_four_times_the_noise_is_detected_and_none_is_seldom() -> None:
    naive, twice, better = verdicts(0.0, np.random.default_rng(0))
    assert naive > 0.9, "the best of twenty is above the first by luck"
    assert twice > 0.1, "twice the standard error of three differences, the best of three sets, is too easily passed"
    assert better <= 0.04, "half of 5 %, and three standard deviations of a thousand searches"
    assert verdicts(0.04, np.random.default_rng(0))[2] > 0.9


@pytest.mark.parametrize(
    ("sets", "freedom", "published"),  # Dunnett 1964, two-sided, 5 %
    [(1, 6, 2.45), (3, 6, 3.10), (2, 4, 3.31), (3, 8, 2.88)],
)
def test_critical_values_are_dunnetts(sets: int, freedom: int, published: float) -> None:
    assert critical(sets, freedom) == pytest.approx(published, abs=0.03)
    assert critical(1, 100_000) == 2, "a gain below twice its standard error is none"


def test_what_diverged_is_not_judged() -> None:
    values = {(number, seed): 0.1 * number + 0.001 * (seed == number) for number in range(3) for seed in (1, 2, 3)}
    start, first, second = judge(values, 2)
    assert start == (0, 0, None) and first.gain is not None and second.gain is not None
    assert second.gain.is_better and second.gain.mean == pytest.approx(0.2, abs=0.001)

    del values[1, 2]
    start, first, second = judge(values, 2)
    assert first.gain is None and first.diverged == 1 and first.mean == pytest.approx(0.1, abs=0.001)
    assert second.gain is not None and second.gain.is_better

    for seed in (2, 3):
        del values[0, seed]
    start, first, second = judge(values, 2)
    assert [s.diverged for s in (start, first, second)] == [2, 1, 0] and second.gain is None
    sets = [SimpleNamespace(number=7, value=0.4), SimpleNamespace(number=9, value=0.3)]
    winner, said = verdict(sets, [start, first, second])
    assert winner is sets[1] and said.startswith("Better: the start diverged with 2 of 3 seeds, trial 9 with none.")
    standings = [start, first, *judge({}, 0)]
    winner, said = verdict(sets, standings)
    assert winner is None and said.startswith("Not better: the start diverged with 2 of 3 seeds, every set with some")
    assert "| trial 9 | 0.3000 |  |  | diverged with 3 of 3 seeds |" in page(said, "map", (), sets, standings)


def test_neither_one_seed_nor_equal_sets_are_better() -> None:
    for found, expected in (
        (gains(np.zeros(1), np.ones((1, 1))), Gain(1, np.inf)),
        (gains(np.zeros(3), np.zeros((1, 3))), Gain(0, 0)),
    ):
        assert found == [expected] and not expected.is_better
