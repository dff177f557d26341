"""Properties of every loss with task-aligned assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.models.heads.criterion import LossMeter, LossSettings
from tests.models.heads import free_oracle as free
from tests.models.heads import yolox_oracle as yolox
from tests.models.heads.free_oracle import HYP, SHAPES_HW, SIZE_HW, A, matched, random_targets

Raw = Callable[[int], list[Tensor]]
each_head = pytest.mark.parametrize(
    ("head", "raw"), [(free.made_head(), free.raw_predictions), (yolox.made_head(), yolox.raw_predictions)]
)


def loss_of(head: Any, smoothing: float = 0.0) -> Any:
    return head.criterion(LossSettings.of(HYP, imgsz=96, label_smoothing=smoothing))


@each_head
def test_of_a_crowd_no_cell_is_trained_for_two(head: Any, raw: Raw) -> None:
    criterion, predictions, targets = loss_of(head), raw(1), random_targets(600, 1)
    assert A / 2 < len(matched(criterion, predictions, targets)) <= A
    loss, _ = criterion(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))


@pytest.mark.parametrize("made_head", [free.made_head, yolox.made_head, lambda nc: free.made_head(nc, reg_max=1)])
@pytest.mark.parametrize("nc", [1, 80])
def test_a_fresh_head_learns_of_objects_far_smaller_than_its_boxes(made_head: Callable[[int], Any], nc: int) -> None:
    """Else a set of small objects would be learnt to be empty."""
    torch.manual_seed(0)
    head = made_head(nc)
    predictions = head([torch.randn(1, 8, *shape) for shape in SHAPES_HW])
    corners = torch.cartesian_prod(torch.arange(3, 90, 12), torch.arange(3, 58, 12)).float()
    targets = torch.cat((torch.zeros(len(corners), 2), corners, corners + 3), 1)
    criterion = loss_of(head)
    ((_, slots),) = criterion.assign_cells(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert (slots.target_scores.view(len(targets), -1) > 0).any(1).all()


@each_head
def test_an_empty_batch_learns_that_it_is_empty(head: Any, raw: Raw) -> None:
    """All gradients are zero but those of objectness, or without it of the classes."""
    criterion, predictions = loss_of(head), raw(2)
    loss, parts = criterion(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    gain = HYP.obj if head.has_objectness else HYP.cls
    torch.testing.assert_close(loss, gain * F.softplus(predictions[1]).sum())
    assert parts[0] == 0 == parts[2]
    for output, gradient in enumerate(torch.autograd.grad(loss, predictions)):
        assert (gradient > 0).all() if output == 1 else not gradient.any()
    assert LossMeter(criterion).losses([None]) == (0.0, 0.0, 0.0)


@each_head
def test_label_smoothing_is_said_to_have_no_effect(head: Any, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    loss_of(head, smoothing=0.1)
    assert "--label-smoothing has no effect" in caplog.text
