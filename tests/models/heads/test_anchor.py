"""AutoAnchor: recall compared with plain loops, improvement, and robustness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tessera.models.heads import anchor as autoanchor
from tessera.models.heads.anchor import best_possible_recall, fit_anchors, kmeans_anchors
from tessera.models.heads.criterion import LossSettings
from tests.models.heads.anchor_oracle import ANCHORS_PX, Head

COCO_PX = np.array(ANCHORS_PX, np.float32)


@pytest.fixture(autouse=True)
def few_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoanchor, "GENERATIONS", 50)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def tiny_labels(count: int = 300) -> np.ndarray:
    """Far smaller than any of the anchors, and flat."""
    return np.exp(rng(1).normal((1.4, 1.0), 0.25, (count, 2)))


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 8), st.just(2)), elements=st.floats(0.5, 500)),
    hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.just(2)), elements=st.floats(1, 500)),
)
def test_recall_equals_plain_loops(wh: np.ndarray, anchors: np.ndarray) -> None:
    fits = [
        [max(w / aw, aw / w, h / ah, ah / h) < 4.0001 for aw, ah in anchors]  # off any ratio that is exact
        for w, h in wh
    ]
    recall, per_label = best_possible_recall(wh, anchors, 4.0001)
    assert recall == pytest.approx(np.mean([any(row) for row in fits]))
    assert per_label == pytest.approx(np.mean([sum(row) for row in fits]))


def test_clusters_are_found() -> None:
    sizes = np.array([[8.0, 8], [40, 20], [20, 90], [200, 150]])
    wh = np.concatenate([size * np.exp(rng(i).normal(0, 0.03, (100, 2))) for i, size in enumerate(sizes)])
    anchors = kmeans_anchors(wh, 4, 4.0, rng())
    assert anchors.dtype == np.float32 and anchors.shape == (4, 2)
    for size in sizes:
        ratio = np.maximum(anchors / size, size / anchors).max(1)
        assert ratio.min() < 1.15, (size, anchors)
    assert (np.diff(anchors.prod(1)) >= 0).all()
    np.testing.assert_array_equal(anchors, kmeans_anchors(wh, 4, 4.0, rng()))
    assert not np.array_equal(anchors, kmeans_anchors(wh, 4, 4.0, rng(1)))


def test_mutation_raises_the_mean_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    wh = np.exp(rng(2).normal(3.5, 0.9, (500, 2)))

    def mean_ratio(anchors: np.ndarray) -> float:
        ratio = np.minimum(wh[:, None] / anchors, anchors / wh[:, None]).min(2).max(1)
        return float((ratio * (ratio > 0.25)).mean())

    means = []
    for generations in (0, 1000):
        monkeypatch.setattr(autoanchor, "GENERATIONS", generations)
        means.append(mean_ratio(kmeans_anchors(wh, 9, 4.0, rng())))
    assert means[1] > means[0] + 0.01


def test_labels_below_two_pixels_have_no_say() -> None:
    wh = np.concatenate((np.full((50, 2), 40.0), np.full((500, 2), 1.9), np.full((500, 2), [1.0, 300.0])))
    anchors = kmeans_anchors(wh, 3, 4.0, rng())
    assert (anchors > 30).all() and (anchors < 55).all()


def test_anchors_that_do_not_fit_are_replaced_in_order_of_area() -> None:
    head, wh = Head(), tiny_labels()
    anchors_px, message = fit_anchors(head, wh, 4.0, rng())
    assert "new anchors raise" in message
    assert anchors_px.shape == (3, 3, 2) and (np.diff(anchors_px.reshape(-1, 2).prod(1)) >= 0).all()
    recalls = [best_possible_recall(wh, px.reshape(-1, 2), 4.0)[0] for px in (COCO_PX, anchors_px)]
    assert recalls[1] > 0.99 > recalls[0] and f"from {recalls[0]:.4f} to {recalls[1]:.4f}" in message


def test_coarse_layers_get_the_large_anchors_in_any_order() -> None:
    anchors_px, _ = fit_anchors(Head(strides=(32, 8, 16)), tiny_labels(), 4.0, rng())
    area = anchors_px.prod(2).mean(1)
    assert area[1] < area[2] < area[0]


@pytest.mark.parametrize(
    ("wh", "reason"),
    [
        (np.exp(rng(4).normal(np.log(60), 0.5, (200, 2))), "a good fit"),
        (np.zeros((0, 2)), "too few"),
        (np.full((5, 2), 2.1), "too few"),
        (np.full((500, 2), 1.0), "too few"),
        (np.zeros((500, 2)), "too few"),
        # Half of the labels are out of reach for k-means too, since it leaves them out.
        (np.concatenate((np.full((100, 2), 60.0), np.full((100, 2), 1.0))), "recall 0.5000, with fitted anchors"),
    ],
)
def test_the_own_anchors_are_kept_where_they_fit_or_others_fit_no_better(wh: np.ndarray, reason: str) -> None:
    anchors_px, message = fit_anchors(Head(), wh, 4.0, rng())
    assert reason in message
    np.testing.assert_allclose(anchors_px, COCO_PX, rtol=1e-6)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 40), st.sampled_from([0.0, 0.01, 2.0, 2.05, 3.0, 700.0]), st.sampled_from([0.5, 2.05, 30.0, 5000.0])
)
def test_labels_all_alike_never_crash(count: int, width: float, height: float) -> None:
    wh = np.full((count, 2), (width, height))
    anchors_px, _ = fit_anchors(Head(), wh, 4.0, rng())
    assert np.isfinite(anchors_px).all() and (anchors_px > 0).all()
    before, after = (best_possible_recall(wh, px.reshape(-1, 2), 4.0)[0] for px in (COCO_PX, anchors_px))
    assert after >= before
    if count >= 9 and min(width, height) > 2:
        assert after == 1.0


def test_a_head_fits_its_own_anchors_unless_asked_not_to(caplog: pytest.LogCaptureFixture) -> None:
    wh, settings = tiny_labels(), LossSettings(box=0.05, cls=0.5)
    caplog.set_level("INFO")
    head = Head()
    before = head.anchors.clone()
    assert head.prepare(wh, settings, None) == {} and not caplog.messages
    found, same = (head.prepare(wh, settings, rng())["anchors"] for _ in range(2))
    assert torch.equal(found, same), "a function of the labels and the seed"
    assert torch.equal(head.anchors, before) and "AutoAnchor: new anchors raise" in caplog.text
    pixels = found * torch.tensor(head.strides)[:, None, None]
    assert torch.equal(pixels, torch.from_numpy(fit_anchors(head, wh, 4.0, rng())[0]))
    head.load_state_dict({"anchors": found}, strict=False)
    assert torch.equal(head.priors, found) and head.priors.data_ptr() != head.anchors.data_ptr()
