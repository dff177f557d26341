"""Weighted and resampled images: the metric of the repeated images, and its interval."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.utils.evaluation.average_precision import average_precision
from tessera.utils.evaluation.average_precision import ROUNDS, bootstrap_interval, resampled
from tessera.utils.evaluation.curves import summarize
from tests.utils.evaluation.made_images import accumulate, random_images, random_regions


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_weights_equal_repeated_images(seed: int) -> None:
    """Brute force: an image that counts k times, with its regions, is k copies (scores distinct between images)."""
    rng = np.random.default_rng(seed)
    images = random_images(seed, 7, 3, coarse=True, distinct=True)
    regions = random_regions(images, seed, 3)
    weights = rng.integers(0, 4, (7, 3)).astype(np.float32)
    ranking = accumulate(images, regions)
    ap, present = average_precision(ranking, weights)
    for r in range(3):
        copies = [i for i, times in enumerate(weights[:, r].astype(int)) for _ in range(times)]
        repeated, _ = summarize(accumulate([images[i] for i in copies], [regions[i] for i in copies]), 3)
        np.testing.assert_array_equal(ranking.class_ids[present[:, r]], repeated.class_ids)
        np.testing.assert_allclose(ap[present[:, r], :, r].mean(1), repeated.per_class[:, 3], atol=1e-12)
        assert not ap[~present[:, r], :, r].any()


def test_bootstrap_interval() -> None:
    ranking = accumulate(random_images(8, 60, 3, coarse=False, crowded=True))
    metrics, _ = summarize(ranking, 3)
    interval = bootstrap_interval(ranking, np.random.default_rng(0))
    assert interval == bootstrap_interval(ranking, np.random.default_rng(0))
    samples = resampled(ranking, np.random.default_rng(0), ROUNDS).maps()
    for sampled, (low, high), measured in zip(samples, interval, (metrics.map50, metrics.map), strict=True):
        quarter, three_quarters = np.quantile(sampled, (0.25, 0.75))
        assert low < quarter < measured < three_quarters < high
        assert ((sampled >= low) & (sampled <= high)).mean() == pytest.approx(0.95, abs=0.01)
    ragged = resampled(ranking, np.random.default_rng(0), 130).maps()  # the last chunk is a smaller one
    np.testing.assert_array_equal(ragged[:, :100], samples[:, :100])
    assert np.isfinite(ragged).all()
