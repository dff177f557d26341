"""What holds for every head whose loss is under the task-aligned assignment of models/heads/free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.heads.free import made as free
from tests.models.heads.free.made import HYP, SHAPES_HW, SIZE_HW, A, assert_cuts_add_up, matched, random_targets
from tests.models.heads.yolox import oracle as yolox

Raw = Callable[[int], list[Tensor]]
each_head = pytest.mark.parametrize(
    ("head", "raw"), [(free.made_head(), free.raw_predictions), (yolox.made_head(), yolox.raw_predictions)]
)


def loss_of(head: Any, smoothing: float = 0.0) -> Any:
    return head.criterion(HYP, imgsz=96, label_smoothing=smoothing)


@each_head
@pytest.mark.parametrize(
    "cuts", [[range(8), range(8, 16)], [range(3), range(3, 4), range(4, 16)], [range(i, i + 1) for i in range(16)]]
)
def test_nothing_depends_on_how_a_batch_is_cut(head: Any, raw: Raw, cuts: list[range]) -> None:
    targets = random_targets(40, 16)
    targets = targets[targets[:, 0] != 3]  # an image without objects, and in some cuts a rank without any
    assert_cuts_add_up(loss_of(head), raw(16), targets, cuts)


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
    _, (branch,) = criterion._match(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert (branch[1].targets > 0).any(1).all()


@each_head
def test_label_smoothing_is_said_to_have_no_effect(head: Any, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    loss_of(head, smoothing=0.1)
    assert "--label-smoothing has no effect" in caplog.text
