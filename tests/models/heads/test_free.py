"""Decoding, initialisation, assignment and loss of the anchor-free head, compared with a dense oracle."""

from __future__ import annotations

import copy
import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.models.heads import task_aligned
from tessera.models.heads.criterion import LossMeter, LossSettings, Targets
from tessera.models.heads.free import AnchorFreeLoss
from tessera.models.heads.grid import make_grid
from tessera.models.heads.task_aligned import PAIRS, SoftCrossEntropy, assign_candidates
from tests.models.heads.free_oracle import (
    HYP,
    SHAPES_HW,
    SIZE_HW,
    STRIDES,
    A,
    cells_of,
    decode,
    features,
    made_head,
    matched,
    oracle_loss,
    oracle_targets,
    random_targets,
    raw_predictions,
)
from tests.models.heads.made_models import weighted


@pytest.mark.parametrize("reg_max", [1, 16])
def test_decoding_equals_the_oracle(reg_max: int) -> None:
    head = made_head(reg_max=reg_max).eval()
    with torch.no_grad():
        decoded, (boxes, logits) = head(features())
    expected = decode(boxes, SIZE_HW)
    corners = torch.cat((decoded[..., :2] - decoded[..., 2:4] / 2, decoded[..., :2] + decoded[..., 2:4] / 2), -1)
    torch.testing.assert_close(corners.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(decoded[..., 4:], logits.sigmoid())
    assert decoded.shape[1] == sum(head.rows_per_level(SIZE_HW))


def test_a_negative_distance_is_no_negative_side() -> None:
    head = made_head(1, reg_max=1)
    grid = make_grid(SHAPES_HW, STRIDES, torch.zeros(0))
    found = head.boxes(torch.tensor([3.0, 1.0, -5.0, 2.0]).expand(1, len(grid.centres), 4), grid)
    assert (found[..., 2:] >= found[..., :2]).all()


@pytest.mark.parametrize("reg_max", [1, 16])
def test_a_fresh_head_draws_boxes_of_four_strides_at_the_odds_of_a_dataset(reg_max: int) -> None:
    torch.manual_seed(0)
    head = made_head(5, reg_max).eval()
    with torch.no_grad():
        decoded, _ = head(features())
    sides = decoded[..., 2:4] / cells_of(SIZE_HW)[1][:, None]
    assert abs(float(sides.mean()) - 4) < 0.3
    for level, stride in zip(decoded.split(head.rows_per_level(SIZE_HW), 1), STRIDES, strict=True):
        objects = float(level[..., 4:].sum(2).mean()) * (640 / stride) ** 2
        assert 6 < objects < 10


def test_branches_that_predict_once_are_decoded_when_asked_for_and_move_nothing_below() -> None:
    torch.manual_seed(0)
    head = made_head(end2end=True).eval()
    maps = [x.requires_grad_() for x in features()]
    many, raw = head(maps)
    assert len(raw) == 4
    assert torch.autograd.grad(raw[2].sum() + raw[3].sum(), maps, allow_unused=True) == (None, None, None)
    plain, once_only = copy.deepcopy(head), copy.deepcopy(head)
    plain.strip_for_inference(end2end=False)
    once_only.strip_for_inference(end2end=True)
    assert plain.needs_nms and not once_only.needs_nms
    (same, its_raw), (once, once_raw) = plain(maps), once_only(maps)
    assert torch.equal(same, many) and len(its_raw) == len(once_raw) == 2
    torch.testing.assert_close(many[..., 4:], raw[1].sigmoid())
    torch.testing.assert_close(once[..., 4:], raw[3].sigmoid())


def test_objects_beyond_the_largest_box_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sizes = np.array([[10.0, 20.0], [190.0, 20.0], [30.0, 200.0], [20.0, 640.0]])
    settings = LossSettings.of(HYP)
    made_head(reg_max=16).prepare(sizes, settings, None)
    made_head(reg_max=1).prepare(sizes, settings, None)
    assert not caplog.text
    made_head(reg_max=4).prepare(sizes, settings, None)
    assert "reg_max 4: 50.0% of the objects are larger than 192 px" in caplog.text
    assert "Use a reg_max of 11, or a smaller" in caplog.text


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 14),
    batch=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    reg_max=st.sampled_from([1, 16]),
    topk=st.integers(1, 13),
    pairs=st.sampled_from([1, 100, PAIRS]),
    class_weights=st.sampled_from([[], [0.5, 2.0, 1.0, 0.1, 3.0]]),
    has_label_weights=st.booleans(),
)
def test_targets_loss_and_gradient_equal_the_dense_oracle(
    count: int,
    batch: int,
    seed: int,
    reg_max: int,
    topk: int,
    pairs: int,
    class_weights: list[float],
    has_label_weights: bool,
) -> None:
    hyp = dataclasses.replace(HYP, topk=topk)
    targets, predictions = random_targets(count, batch, seed=seed), raw_predictions(batch, 5, reg_max, seed)
    targets = weighted(targets) if has_label_weights else targets
    weights = torch.tensor(class_weights) if class_weights else None
    criterion = AnchorFreeLoss(made_head(5, reg_max), LossSettings.of(hyp, class_weights=weights))
    wanted = oracle_targets([p.detach() for p in predictions], targets, hyp, SIZE_HW)
    with mock.patch.object(task_aligned, "PAIRS", pairs):
        found = matched(criterion, predictions, targets)
    assert found == pytest.approx({place: score for place, (_, score) in wanted.items()}, rel=1e-4, abs=1e-9)
    loss, parts = criterion(predictions, criterion.assign(targets, batch, SIZE_HW))
    expected = oracle_loss(predictions, targets, hyp, SIZE_HW, class_weights)
    torch.testing.assert_close(parts.double(), expected.detach(), rtol=1e-4, atol=1e-6)
    ours, theirs = (torch.autograd.grad(part, predictions, materialize_grads=True) for part in (loss, expected.sum()))
    for grad, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-5)


def test_every_object_that_touches_the_image_has_candidates() -> None:
    criterion = AnchorFreeLoss(made_head(), LossSettings.of(HYP))
    boxes = [[40, 20, 41, 21], [0, 0, 1, 60], [4, 4, 12, 12], [95, 63, 96, 64], [-300, -300, 400, 400], [12, 4, 20, 12]]
    targets = torch.tensor([[0, 0, *box] for box in boxes], dtype=torch.float32)
    assignment = criterion.assign(targets, 1, SIZE_HW)
    owners, _ = assignment.pairs_of(assignment.parts[0])
    assert torch.bincount(owners, minlength=len(boxes)).min() >= 1
    assert int((owners == 4).sum()) == A
    beyond = torch.tensor([[0, 0, 200, 200, 240, 240]], dtype=torch.float32)
    assert len(criterion.assign(beyond, 1, SIZE_HW).classes) == 0
    loss, _ = criterion(raw_predictions(1), criterion.assign(beyond, 1, SIZE_HW))
    assert loss.isfinite()


def test_the_pairs_at_hand_stay_few_however_large_and_many_the_objects_are() -> None:
    """All of them are 12 million, in the memory of a GPU a gigabyte for every few numbers a pair."""
    rows = np.array([[0, 0, 0, 0, 640, 640]], np.float32).repeat(1500, 0)
    assignment = assign_candidates(
        Targets(rows, rows[:0], rows[:0]), STRIDES, 10, 1, tuple((640 // s, 640 // s) for s in STRIDES)
    )
    pairs = [part.pairs for part in assignment.parts]
    assert sum(pairs) == 1500 * 8400 and max(pairs) <= PAIRS + 8400
    held = sum(value.nbytes for value in vars(assignment).values() if isinstance(value, Tensor))
    assert held < 1500 * 500, "bytes do not grow with the sizes of the objects"


def test_of_equal_predictions_the_first_cells_and_the_first_object_win() -> None:
    criterion = AnchorFreeLoss(made_head(1, reg_max=1), LossSettings.of(dataclasses.replace(HYP, topk=3)))
    targets = torch.tensor([[0, 0, 0, 0, 96, 64], [0, 0, 0, 0, 96, 64]], dtype=torch.float32)
    centres, strides = cells_of(SIZE_HW)
    whole_image = torch.cat((centres, torch.tensor([96, 64]) - centres), 1) / strides[:, None]
    predictions = [whole_image.float()[None], torch.full((1, A, 1), math.log(9))]
    assignment = criterion.assign(targets, 1, SIZE_HW)
    ((_, slots),) = criterion.assign_cells(predictions, assignment)
    assert slots.cells[:3].tolist() == [0, 1, 2]
    assert (slots.target_scores[:3] > 0.99).all() and not slots.target_scores[3:].any()


def test_branches_that_predict_once_are_matched_with_one_cell_and_leave_the_others_alone() -> None:
    plain, both = (AnchorFreeLoss(made_head(end2end=end2end), LossSettings.of(HYP)) for end2end in (False, True))
    assert both.names == ("box", "cls", "dfl", "one_box", "one_cls", "one_dfl")
    targets, many, once = random_targets(9, 3), raw_predictions(3), raw_predictions(3, seed=1)
    loss, parts = both([*many, *once], both.assign(targets, 3, SIZE_HW))
    alone, its_parts = plain(many, plain.assign(targets, 3, SIZE_HW))
    assert torch.equal(parts[:3], its_parts)
    expected = oracle_loss(once, targets, dataclasses.replace(HYP, topk=1), SIZE_HW)
    torch.testing.assert_close(parts[3:].double(), expected.detach(), rtol=1e-4, atol=1e-6)
    for grad, same in zip(torch.autograd.grad(loss, many), torch.autograd.grad(alone, many), strict=True):
        assert torch.equal(grad, same)
    meter = LossMeter(both)
    meter.update([*many, *once], both.assign(targets, 3, SIZE_HW))
    assert meter.losses([meter.total()]) == pytest.approx(parts.tolist(), rel=1e-5)


def test_boxes_beyond_the_last_bin_are_trained_as_the_last() -> None:
    head, targets = made_head(1, reg_max=4), torch.tensor([[0, 0, 0, 0, 96, 64]], dtype=torch.float32)
    criterion = AnchorFreeLoss(head, LossSettings.of(HYP))
    predictions = raw_predictions(1, 1, 4)
    loss, _ = criterion(predictions, criterion.assign(targets, 1, SIZE_HW))
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [None, torch.tensor([1, 0, 0, 1, 0, 1, 0]).bool()[:, None], torch.eye(7, 3).bool()])
def test_soft_cross_entropy_has_the_value_and_gradient_of_the_dense_one(
    dtype: torch.dtype, ignored: Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 3, generator=generator).to(dtype).requires_grad_()
    cells, classes = torch.tensor([1, 4, 1, 6, 6]), torch.tensor([2, 0, 2, 1, 1])
    targets = torch.tensor([0.7, 0.2, 0.0, 0.0, 0.9])
    truth = torch.zeros(7, 3).index_put_((cells, classes), targets, accumulate=True)
    ours = SoftCrossEntropy.apply(logits, cells, classes, targets, ignored)
    weight = None if ignored is None else (~ignored).float()
    theirs = F.binary_cross_entropy_with_logits(logits.float(), truth, weight, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    (mine,), (wanted,) = torch.autograd.grad(2 * ours, [logits]), torch.autograd.grad(2 * theirs, [logits])
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, wanted)
