"""Single terms of the anchor-based loss: edge cases, weights and options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.models.heads.anchor_loss import AnchorAssignment, AnchorLoss, objectness_balance, scaled_gains
from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import Hyp
from tessera.utils.errors import ConfigError
from tests.models.heads.anchor.made_loss import SIZE_HW, Head, random_targets, raw_predictions


def candidate_rows(predictions: list[Tensor], assignment: AnchorAssignment) -> Tensor:
    """What is predicted in the cell of each candidate, (candidates, 5 + C)."""
    cells = assignment.cells.split(assignment.cells_per_level, 1)
    return torch.cat([p[at.unbind(0)] for p, at in zip(predictions, cells, strict=True)])[assignment.positive_cells]


@pytest.mark.parametrize("nc", [1, 5])
def test_a_batch_without_objects_still_has_every_gradient(hyp: Hyp, nc: int) -> None:
    criterion = AnchorLoss(Head(nc=nc), LossSettings.of(hyp, imgsz=96))
    predictions = raw_predictions(2, SIZE_HW, nc)
    loss, items = criterion(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    loss.backward()
    assert items[0] == 0 and items[1] > 0 and items[2] == 0
    for prediction in predictions:
        grad = prediction.grad
        assert grad is not None and grad.isfinite().all()
        assert (grad[..., 4] > 0).all()
        assert grad[..., :4].count_nonzero() == 0 and grad[..., 5:].count_nonzero() == 0


def test_one_class_has_no_class_loss(hyp: Hyp) -> None:
    criterion = AnchorLoss(Head(nc=1), LossSettings.of(hyp, imgsz=96))
    predictions = raw_predictions(2, SIZE_HW, 1)
    loss, items = criterion(predictions, criterion.assign(random_targets(20, 2, SIZE_HW, 1), 2, SIZE_HW))
    gradients = torch.autograd.grad(loss, predictions)
    assert items[2] == 0 and all(g[..., 5].count_nonzero() == 0 for g in gradients)


def test_positive_weights_and_smoothing(hyp: Hyp) -> None:
    targets = random_targets(20, 2, SIZE_HW, 5)
    predictions = [p.detach() for p in raw_predictions(2, SIZE_HW, 5)]
    plain = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96))
    assignment = plain.assign(targets, 2, SIZE_HW)
    rows = candidate_rows(predictions, assignment)

    smooth = AnchorLoss(Head(), LossSettings.of(replace(hyp, cls_pw=3.0), imgsz=96, label_smoothing=0.2))
    truth = torch.full((len(rows), 5), 0.1)
    truth[range(len(rows)), assignment.classes] = 0.9
    logits = rows[:, 5:]
    expected = -(3 * truth * F.logsigmoid(logits) + (1 - truth) * F.logsigmoid(-logits))
    torch.testing.assert_close(smooth.sums(predictions, assignment)[:, 2].sum(), expected.sum())

    weighted = AnchorLoss(Head(), LossSettings.of(replace(hyp, obj_pw=3.0), imgsz=96))
    more = weighted.sums(predictions, assignment)[:, 1] - plain.sums(predictions, assignment)[:, 1]
    assert (more[:2] > 0).all(), "a positive weight counts positive cells more"
    nothing = plain.assign(torch.zeros(0, 6), 2, SIZE_HW)
    torch.testing.assert_close(weighted.sums(predictions, nothing), plain.sums(predictions, nothing))


def test_focal_loss(hyp: Hyp) -> None:
    """Without objects: 0.75 p^gamma BCE, whatever the sign conventions of the implementation."""
    criterion = AnchorLoss(Head(), LossSettings.of(replace(hyp, fl_gamma=1.5), imgsz=96))
    predictions = [p.detach() for p in raw_predictions(2, SIZE_HW, 5)]
    sums = criterion.sums(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    for level, p in enumerate(predictions):
        x = p[..., 4]
        torch.testing.assert_close(sums[level, 1], (0.75 * x.sigmoid() ** 1.5 * F.softplus(x)).sum())

    targets = random_targets(20, 2, SIZE_HW, 5)
    assignment = criterion.assign(targets, 2, SIZE_HW)
    rows = candidate_rows(predictions, assignment)
    hit = F.one_hot(assignment.classes, 5).bool()
    x = rows[:, 5:]
    expected = torch.where(
        hit, 0.25 * x.sigmoid().neg().add(1) ** 1.5 * F.softplus(-x), 0.75 * x.sigmoid() ** 1.5 * F.softplus(x)
    )
    torch.testing.assert_close(criterion.sums(predictions, assignment)[:, 2].sum(), expected.sum())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_saturated_logits_have_finite_gradients(hyp: Hyp, gamma: float) -> None:
    criterion = AnchorLoss(Head(), LossSettings.of(replace(hyp, fl_gamma=gamma), imgsz=96))
    assignment = criterion.assign(random_targets(20, 2, SIZE_HW, 5), 2, SIZE_HW)
    predictions = [(p.detach() * 200).requires_grad_() for p in raw_predictions(2, SIZE_HW, 5)]
    loss, _ = criterion(predictions, assignment)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))


def test_scaled_gains_leave_the_hyperparameters_alone(hyp: Hyp) -> None:
    assert scaled_gains(LossSettings.of(hyp), nc=80, nl=3) == pytest.approx((0.05, 1.0, 0.5))
    assert scaled_gains(LossSettings.of(hyp, imgsz=1280), nc=20, nl=4) == pytest.approx((0.0375, 3.0, 0.09375))


def test_objectness_balance() -> None:
    assert objectness_balance(3) == (4.0, 1.0, 0.4)
    assert objectness_balance(4) == (4.0, 1.0, 0.25, 0.06)
    assert objectness_balance(2) == (4.0, 1.0)
    with pytest.raises(ConfigError, match="6 inputs"):
        objectness_balance(6)
