"""The loss of YOLOX's head against a plain oracle, and what must not change it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.models.heads.criterion import LossMeter
from tessera.models.heads.yolox.loss import YoloxLoss
from tests.models.heads.free.cuts import A, assert_cuts_add_up, matched
from tests.models.heads.free.made import HYP, SIZE_HW, random_targets
from tests.models.heads.yolox.made import SHAPES_HW, made_head, raw_predictions
from tests.models.heads.yolox.oracle import oracle_loss, oracle_targets


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 14),
    batch=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    nc=st.sampled_from([1, 5]),
    topk=st.integers(1, 13),
)
def test_targets_loss_and_gradient_equal_the_oracle(count: int, batch: int, seed: int, nc: int, topk: int) -> None:
    hyp = dataclasses.replace(HYP, topk=topk, obj=0.7)
    targets, predictions = random_targets(count, batch, nc, seed), raw_predictions(batch, nc, seed)
    criterion = YoloxLoss(made_head(nc), hyp)
    wanted = oracle_targets(predictions, targets, hyp, SIZE_HW)
    scores = {place: score for place, (_, score) in wanted.items()}
    assert matched(criterion, predictions, targets) == pytest.approx(scores, rel=1e-3, abs=1e-9)
    loss, parts = criterion(predictions, criterion.assign(targets, batch, SIZE_HW))
    expected = oracle_loss(predictions, targets, hyp, SIZE_HW)
    torch.testing.assert_close(parts.double(), expected.detach(), rtol=1e-3, atol=1e-6)
    theirs = torch.autograd.grad(expected.sum(), predictions, materialize_grads=True)
    for grad, right in zip(torch.autograd.grad(loss, predictions), theirs, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "cuts", [[range(8), range(8, 16)], [range(3), range(3, 4), range(4, 16)], [range(i, i + 1) for i in range(16)]]
)
def test_nothing_depends_on_how_a_batch_is_cut(cuts: list[range]) -> None:
    criterion = YoloxLoss(made_head(), HYP)
    whole, targets = raw_predictions(16), random_targets(40, 16)
    targets = targets[targets[:, 0] != 3]  # an image without objects, and in some cuts a rank without any
    assert_cuts_add_up(criterion, whole, targets, cuts)


def test_an_empty_batch_learns_that_it_is_empty() -> None:
    criterion = YoloxLoss(made_head(), HYP)
    predictions = raw_predictions(2)
    loss, parts = criterion(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    assert parts[0] == 0 == parts[2]
    torch.testing.assert_close(loss, HYP.obj * F.softplus(predictions[1]).sum())
    offsets, objectness, classes = torch.autograd.grad(loss, predictions)
    assert not offsets.any() and (objectness > 0).all() and not classes.any()
    assert LossMeter(criterion).losses([None]) == (0.0, 0.0, 0.0)


def test_an_image_without_objects_trains_its_objectness_alone() -> None:
    criterion = YoloxLoss(made_head(), HYP)
    predictions, targets = raw_predictions(2), random_targets(5, 1)
    loss, _ = criterion(predictions, criterion.assign(targets, 2, SIZE_HW))
    offsets, objectness, classes = torch.autograd.grad(loss, predictions)
    assert offsets[0].any() and classes[0].any()
    assert not offsets[1].any() and not classes[1].any() and (objectness[1] > 0).all()


def test_of_a_crowd_no_cell_is_trained_for_two() -> None:
    criterion = YoloxLoss(made_head(), HYP)
    predictions, targets = raw_predictions(1), random_targets(600, 1)
    found = matched(criterion, predictions, targets)
    _, (branch,) = criterion._match(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert A / 2 < len(found) == int((branch.matches.targets > 0).sum()) <= A
    loss, _ = criterion(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))


@pytest.mark.parametrize("value", [1e30, -1e30, 200.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("column", range(4))
def test_no_offset_makes_the_loss_infinite_or_moves_the_other_cells(column: int, value: float) -> None:
    criterion = YoloxLoss(made_head(), HYP)
    predictions = [p.detach() for p in raw_predictions(1)]
    targets = torch.tensor([[0, 1, 0, 0, 96, 64], [0, 2, 10, 10, 50, 60]], dtype=torch.float32)
    spoiled = int(criterion._match(predictions, criterion.assign(targets, 1, SIZE_HW))[1][0].matches.cells[0, 0])
    predictions[0][0, spoiled, column] = value
    predictions = [p.requires_grad_() for p in predictions]
    loss, _ = criterion(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))
    found = matched(criterion, predictions, targets)
    wanted = oracle_targets(predictions, targets, HYP, SIZE_HW) if abs(value) < 1e30 else None
    assert len(found) > 5 and ((0, spoiled) not in found or column >= 2)
    assert wanted is None or set(found) == set(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_are_trained_in_float32(dtype: torch.dtype) -> None:
    criterion = YoloxLoss(made_head(), HYP)
    half = [p.detach().to(dtype).requires_grad_() for p in raw_predictions(2)]
    full = [p.detach().float().requires_grad_() for p in half]
    assignment = criterion.assign(random_targets(9, 2), 2, SIZE_HW)
    (mine, parts), (right, its_parts) = criterion(half, assignment), criterion(full, assignment)
    assert mine.dtype == torch.float32 and torch.equal(parts, its_parts)
    for grad, wanted in zip(torch.autograd.grad(mine, half), torch.autograd.grad(right, full), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), wanted, rtol=1e-2, atol=1e-3)


def test_a_fresh_head_learns_of_objects_far_smaller_than_its_boxes() -> None:
    torch.manual_seed(0)
    head = made_head(80)
    predictions = head([torch.randn(1, 8, *shape) for shape in SHAPES_HW])
    corners = torch.cartesian_prod(torch.arange(3, 90, 12), torch.arange(3, 58, 12)).float()
    targets = torch.cat((torch.zeros(len(corners), 2), corners, corners + 3), 1)
    _, (branch,) = YoloxLoss(head, HYP)._match(predictions, YoloxLoss(head, HYP).assign(targets, 1, SIZE_HW))
    assert (branch.matches.targets > 0).any(1).all()


def test_label_smoothing_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    made_head().criterion(HYP, imgsz=96, label_smoothing=0.1)
    assert "--label-smoothing has no effect" in caplog.text
