"""Layers and loss of YOLOX's head, compared with an oracle; robustness to extreme outputs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.grid import make_grid
from tessera.models.heads.yolox import LARGEST_LOG, YoloxLoss
from tests.models.heads.free_oracle import HYP, SHAPES_HW, SIZE_HW, STRIDES, cells_of, features, matched, random_targets
from tests.models.heads.made_models import weighted
from tests.models.heads.yolox_oracle import made_head, oracle_loss, oracle_targets, raw_predictions


def test_a_box_is_as_large_as_its_offsets_say_up_to_what_suppression_can_compare() -> None:
    grid = make_grid(SHAPES_HW, STRIDES, torch.zeros(0))
    for offset, meant in ((12.0, 12.0), (1e4, LARGEST_LOG)):
        found = made_head().boxes(torch.full((1, len(grid.centres), 4), offset), grid)
        torch.testing.assert_close(found[0, 0, 2:], torch.full((2,), 8 * math.exp(meant)))
    assert found.square().isfinite().all()


@pytest.mark.parametrize("nc", [1, 80])
def test_a_fresh_head_draws_boxes_of_four_strides_in_its_cells_at_the_odds_of_a_dataset(nc: int) -> None:
    torch.manual_seed(0)
    head = made_head(nc).eval()
    with torch.no_grad():
        decoded, _ = head(features())
    centres, strides = cells_of(SIZE_HW)
    assert ((decoded[..., 2:4] / strides[:, None] - 4).abs() < 0.5).all()
    assert ((decoded[..., :2] - centres).abs() < 0.5 * strides[:, None]).all()
    torch.testing.assert_close(decoded[..., 5:].mean(), torch.tensor(1 / (nc + 1)), rtol=0.05, atol=0)
    for level, stride in zip(decoded.split(head.rows_per_level(SIZE_HW), 1), STRIDES, strict=True):
        assert 7 < float(level[..., 4].mean()) * (640 / stride) ** 2 < 9


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 14),
    batch=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    nc=st.sampled_from([1, 5]),
    topk=st.integers(1, 13),
    has_class_weights=st.booleans(),
    has_label_weights=st.booleans(),
)
def test_targets_loss_and_gradient_equal_the_oracle(
    count: int, batch: int, seed: int, nc: int, topk: int, has_class_weights: bool, has_label_weights: bool
) -> None:
    hyp = dataclasses.replace(HYP, topk=topk, obj=0.7)
    targets, predictions = random_targets(count, batch, nc, seed), raw_predictions(batch, nc, seed)
    targets = weighted(targets) if has_label_weights else targets
    class_weights = [0.5, 2.0, 1.0, 0.1, 3.0][:nc] if has_class_weights else []
    weights = torch.tensor(class_weights) if has_class_weights else None
    criterion = YoloxLoss(made_head(nc), LossSettings.of(hyp, class_weights=weights))
    wanted = oracle_targets(predictions, targets, hyp, SIZE_HW)
    scores = {place: score for place, (_, score) in wanted.items()}
    assert matched(criterion, predictions, targets) == pytest.approx(scores, rel=1e-3, abs=1e-9)
    loss, parts = criterion(predictions, criterion.assign(targets, batch, SIZE_HW))
    expected = oracle_loss(predictions, targets, hyp, SIZE_HW, class_weights)
    torch.testing.assert_close(parts.double(), expected.detach(), rtol=1e-3, atol=1e-6)
    theirs = torch.autograd.grad(expected.sum(), predictions, materialize_grads=True)
    for grad, right in zip(torch.autograd.grad(loss, predictions), theirs, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", [1e30, -1e30, 200.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("column", range(4))
def test_no_offset_makes_the_loss_infinite_or_moves_the_other_cells(column: int, value: float) -> None:
    criterion = YoloxLoss(made_head(), LossSettings.of(HYP))
    predictions = [p.detach() for p in raw_predictions(1)]
    targets = torch.tensor([[0, 1, 0, 0, 96, 64], [0, 2, 10, 10, 50, 60]], dtype=torch.float32)
    spoiled = int(criterion.assign_cells(predictions, criterion.assign(targets, 1, SIZE_HW))[0][1].cells[0])
    predictions[0][0, spoiled, column] = value
    predictions = [p.requires_grad_() for p in predictions]
    loss, _ = criterion(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))
    found = matched(criterion, predictions, targets)
    wanted = oracle_targets(predictions, targets, HYP, SIZE_HW) if abs(value) < 1e30 else None
    assert len(found) > 5 and ((0, spoiled) not in found or column >= 2)
    assert wanted is None or set(found) == set(wanted)
