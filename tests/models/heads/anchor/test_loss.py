"""Loss of the anchor-based head, compared with reference values and an oracle; determinism and memory formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.models.heads.anchor_loss import AnchorLoss, scaled_gains
from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import Hyp
from tests.models.heads.anchor.loss_oracle import oracle_loss
from tests.models.heads.anchor.made_loss import SIZE_HW, Head, random_targets, raw_predictions, reference_targets


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
    predictions = raw_predictions(2, SIZE_HW, 5)
    weights = torch.tensor(class_weights) if class_weights else None
    criterion = AnchorLoss(Head(), LossSettings.of(hyp, imgsz=96, class_weights=weights))
    assignment = criterion.assign(targets, 2, SIZE_HW)
    assert assignment.cells.shape[1] < len(assignment.positive_cells), (
        "the case must hold cells that two candidates lie in"
    )
    loss, items = criterion(predictions, assignment)
    expected = oracle_loss(predictions, targets, hyp, 5, SIZE_HW, class_weights)
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
