"""Assignment and loss of the anchor-based head, compared with reference values and plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.models.heads.anchor_loss import AnchorAssignment, AnchorLoss, objectness_balance, scaled_gains
from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.errors import ConfigError
from tests.models.heads.anchor_oracle import (
    SIZE_HW,
    Head,
    grid_anchors,
    oracle_assignment,
    oracle_loss,
    random_targets,
    raw_predictions,
    reference_targets,
)
from tests.models.heads.made_models import weighted


def test_assignment_equals_the_reference(shared: Path, hyp: Hyp) -> None:
    expected = np.load(shared / "reference" / "assign.npz")
    assignment = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=256)).assign(reference_targets(shared), 4, (256, 256))
    taken = assignment.cells[:, assignment.positive_cells].T
    split = [t.split(assignment.positives_per_level) for t in (taken, assignment.boxes, assignment.classes)]
    anchors = assignment.anchors.split(assignment.positives_per_level)
    for level in range(3):
        ours = np.column_stack((split[0][level], split[2][level], anchors[level], split[1][level]))
        theirs = np.column_stack([expected[f"{part}{level}"] for part in ("idx", "cls", "anchor", "box")])
        assert ours.shape == theirs.shape
        by_value = [rows[np.lexsort(rows.round(3).T[::-1])] for rows in (ours, theirs)]
        np.testing.assert_allclose(*by_value, atol=2e-5)


COORDINATES = st.integers(0, 4 * 96).map(lambda quarter: quarter / 4)  # whole cells and their halves come up often


@st.composite
def target_rows(draw: st.DrawFn) -> list[float]:
    x1, x2 = sorted(min(draw(COORDINATES), SIZE_HW[1]) for _ in range(2))
    y1, y2 = sorted(min(draw(COORDINATES), SIZE_HW[0]) for _ in range(2))
    return [draw(st.integers(0, 1)), draw(st.integers(0, 4)), x1, y1, x2, y2]


@settings(max_examples=150, deadline=None)
@given(st.lists(target_rows(), max_size=6))
def test_assignment_equals_three_plain_loops(rows: list[list[float]]) -> None:
    targets = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    assignment = AnchorLoss(Head(), LossSettings.of(load_hyp("hyp.scratch-low.yaml"), imgsz=96)).assign(
        targets, 2, SIZE_HW
    )
    expected = oracle_assignment(targets, 4.0, SIZE_HW)
    assert assignment.positives_per_level == tuple(map(len, expected))

    taken = assignment.cells[:, assignment.positive_cells].T.tolist()
    flat = [candidate for level in expected for candidate in level]
    assert taken == [list(candidate[:4]) for candidate in flat]
    assert assignment.classes.tolist() == [int(rows[candidate[4]][1]) for candidate in flat]

    first = 0
    last_positives = assignment.last_positives.split(assignment.cells_per_level)
    cells = assignment.cells.split(assignment.cells_per_level, dim=1)
    for level, level_last, level_cells in zip(expected, last_positives, cells, strict=True):
        last = {candidate[:4]: first + position for position, candidate in enumerate(level)}
        assert dict(zip(map(tuple, level_cells.T.tolist()), level_last.tolist(), strict=True)) == last
        first += len(level)


def test_anchors_set_after_the_criterion_was_built_count(hyp: Hyp) -> None:
    head = Head()
    criterion = AnchorLoss(head, LossSettings.of(hyp, imgsz=96))
    targets = random_targets(25, 2, SIZE_HW, 5)
    criterion.assign(targets, 2, SIZE_HW)
    head.load_state_dict({"anchors": grid_anchors() * 1.7}, strict=False)
    expected = AnchorLoss(head, LossSettings.of(hyp, imgsz=96)).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)
    head.anchors = grid_anchors()  # as `module.to(device)` replaces a buffer
    expected = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96)).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)


def test_loss_and_gradient_equal_the_reference(shared: Path, hyp: Hyp) -> None:
    expected = np.load(shared / "reference" / "loss.npz")
    predictions = [torch.from_numpy(expected[f"p{level}"]).requires_grad_() for level in range(3)]
    criterion = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=256))
    np.testing.assert_allclose(scaled_gains(LossSettings.of(hyp, imgsz=256), nc=5, nl=3), expected["gains"], rtol=1e-6)

    loss, items = criterion(predictions, criterion.assign(reference_targets(shared), 4, (256, 256)))
    (loss * 4).backward()
    np.testing.assert_allclose(loss.item() * 4, expected["loss"][0], rtol=1e-5)
    np.testing.assert_allclose(items, expected["items"], rtol=1e-5)
    for level, prediction in enumerate(predictions):
        assert prediction.grad is not None
        np.testing.assert_allclose(prediction.grad.double().sum(), expected[f"grad_sum_p{level}"], rtol=1e-5)
        np.testing.assert_allclose(prediction.grad.double().abs().sum(), expected[f"grad_abs_sum_p{level}"], rtol=1e-5)


@pytest.mark.parametrize("class_weights", [[], [0.5, 2.0, 1.0, 0.1, 3.0]], ids=["plain", "weighted"])
def test_loss_and_gradient_equal_plain_loops(hyp: Hyp, class_weights: list[float]) -> None:
    targets = random_targets(25, 2, SIZE_HW, 5)
    targets = weighted(targets) if class_weights else targets
    predictions = raw_predictions(2, SIZE_HW, 5)
    weights = torch.tensor(class_weights) if class_weights else None
    criterion = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96, class_weights=weights))
    assignment = criterion.assign(targets, 2, SIZE_HW)
    assert assignment.cells.shape[1] < len(assignment.positive_cells), (
        "the case must hold cells that two candidates lie in"
    )
    loss, items = criterion(predictions, assignment)
    by_weight = targets[targets[:, -1].argsort(stable=True)] if class_weights else targets  # the surest comes last
    expected = oracle_loss(predictions, by_weight, hyp, 5, SIZE_HW, class_weights)
    torch.testing.assert_close(items, expected.detach())
    ours, theirs = torch.autograd.grad(loss, predictions), torch.autograd.grad(expected.sum(), predictions)
    for grad, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-7)


def test_memory_format_does_not_matter(hyp: Hyp) -> None:
    criterion = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96))
    assignment = criterion.assign(random_targets(25, 2, SIZE_HW, 5), 2, SIZE_HW)
    last = raw_predictions(2, SIZE_HW, 5)
    first = [p.detach().permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2).requires_grad_() for p in last]
    plain = [p.detach().contiguous().requires_grad_() for p in last]
    expected = torch.autograd.grad(criterion(last, assignment)[0], last)
    for predictions in (first, plain):
        for p, grad, wanted in zip(
            predictions, torch.autograd.grad(criterion(predictions, assignment)[0], predictions), expected, strict=True
        ):
            torch.testing.assert_close(grad, wanted)
            assert grad.stride() == p.stride(), "a gradient laid out otherwise would be copied by the convolution"


def test_repeated_runs_agree_to_the_bit_with_two_threads(hyp: Hyp) -> None:
    size_hw = (320, 320)
    criterion = AnchorLoss(Head(nc=20), LossSettings.of(hyp, imgsz=320))
    targets = random_targets(400, 4, size_hw, 20)
    targets[200:, 2:] = targets[:200, 2:]  # the same boxes again: cells with many candidates
    assignment = criterion.assign(targets, 4, size_hw)
    predictions = raw_predictions(4, size_hw, 20)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runs = []
        for _ in range(5):
            loss, _ = criterion(predictions, assignment)
            runs.append((loss.detach(), *torch.autograd.grad(loss, predictions)))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_the_backward_reads_no_value(hyp: Hyp) -> None:
    """Some gradients of torch look at values, though only of tensors that have any, and in no dispatch mode."""
    criterion = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96))
    assignment = criterion.assign(random_targets(25, 2, SIZE_HW, 5), 2, SIZE_HW)
    loss, _ = criterion(raw_predictions(2, SIZE_HW, 5), assignment)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    called = {event.key for event in profile.key_averages()}
    assert "aten::mul" in called and not called & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


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


def test_objectness_balance() -> None:
    assert objectness_balance(3) == (4.0, 1.0, 0.4)
    assert objectness_balance(4) == (4.0, 1.0, 0.25, 0.06)
    assert objectness_balance(2) == (4.0, 1.0)
    with pytest.raises(ConfigError, match="6 inputs"):
        objectness_balance(6)
