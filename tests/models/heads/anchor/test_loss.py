"""The loss and its assignment against reference values, a plain oracle, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.detector import DetectionModel
from models.heads.anchor.head import Detect
from models.heads.anchor.loss import DetectionLoss, objectness_balance, scaled_gains
from models.heads.anchor.priors import set_anchors
from models.heads.criterion import LossMeter
from utils.boxes import complete_iou, cxcywh_to_xyxy
from utils.config import Hyp, load_hyp
from utils.errors import ConfigError
from utils.machine.accelerator import Accelerator

ANCHORS_PX = [
    [[10, 13], [16, 30], [33, 23]],
    [[30, 61], [62, 45], [59, 119]],
    [[116, 90], [156, 198], [373, 326]],
]


def _grid_anchors() -> Tensor:
    return torch.tensor(ANCHORS_PX, dtype=torch.float32) / torch.tensor([8.0, 16.0, 32.0])[:, None, None]


def Head(nc: int = 5) -> Detect:
    """A head of three levels with the anchors above."""
    flat = [[side for pair in level for side in pair] for level in ANCHORS_PX]
    return Detect(nc, flat, channels=(1, 1, 1), strides=(8, 16, 32))


@pytest.fixture(scope="module")
def hyp() -> Hyp:
    return load_hyp("hyp.scratch-low.yaml")


def raw_predictions(batch_size: int, size_hw: tuple[int, int], nc: int, seed: int = 0) -> list[Tensor]:
    """Views of channels-last memory, as a convolution of such a model gives them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch_size, size_hw[0] // s, size_hw[1] // s, 3, 5 + nc, generator=generator)
        .permute(0, 3, 1, 2, 4)
        .requires_grad_()
        for s in (8, 16, 32)
    ]


def random_targets(count: int, batch_size: int, size_hw: tuple[int, int], nc: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    height, width = size_hw
    centre = rng.uniform(0, (width, height), (count, 2))
    half = rng.uniform(2, 80, (count, 2))
    low, high = np.clip(centre - half, 0, (width, height)), np.clip(centre + half, 0, (width, height))
    image, label = rng.integers(0, batch_size, (count, 1)), rng.integers(0, nc, (count, 1))
    return torch.tensor(np.concatenate((image, label, low, high), 1), dtype=torch.float32)


def reference_targets(shared: Path) -> Tensor:
    rows = torch.from_numpy(np.load(shared / "reference" / "loss.npz")["targets"])
    return torch.cat((rows[:, :2], cxcywh_to_xyxy(rows[:, 2:] * 256)), 1)


# Reference values


def test_assignment_equals_the_reference(shared: Path, hyp: Hyp) -> None:
    expected = np.load(shared / "reference" / "assign.npz")
    assignment = DetectionLoss(Head(), hyp, imgsz=256).assign(reference_targets(shared), 4, (256, 256))
    taken = assignment.cells[:, assignment.candidate_cells].T
    split = [t.split(assignment.positives_per_level) for t in (taken, assignment.boxes, assignment.classes)]
    anchors = assignment.anchors.split(assignment.positives_per_level)
    for level in range(3):
        ours = np.concatenate(
            (split[0][level], split[2][level][:, None], anchors[level], split[1][level]), axis=1, dtype=np.float64
        )
        theirs = np.concatenate(
            [
                expected[f"idx{level}"],
                expected[f"cls{level}"][:, None],
                expected[f"anchor{level}"],
                expected[f"box{level}"],
            ],
            axis=1,
            dtype=np.float64,
        )
        assert ours.shape == theirs.shape
        by_value = [rows[np.lexsort(rows.round(3).T[::-1])] for rows in (ours, theirs)]
        np.testing.assert_allclose(*by_value, atol=2e-5)


def test_loss_and_gradient_equal_the_reference(shared: Path, hyp: Hyp) -> None:
    expected = np.load(shared / "reference" / "loss.npz")
    predictions = [torch.from_numpy(expected[f"p{level}"]).requires_grad_() for level in range(3)]
    criterion = DetectionLoss(Head(), hyp, imgsz=256)
    np.testing.assert_allclose(criterion.gains, expected["gains"], rtol=1e-6)

    loss, items = criterion(predictions, criterion.assign(reference_targets(shared), 4, (256, 256)))
    (loss * 4).backward()
    np.testing.assert_allclose(loss.item() * 4, expected["loss"][0], rtol=1e-5)
    np.testing.assert_allclose(items, expected["items"], rtol=1e-5)
    for level, prediction in enumerate(predictions):
        assert prediction.grad is not None
        np.testing.assert_allclose(prediction.grad.double().sum(), expected[f"grad_sum_p{level}"], rtol=1e-5)
        np.testing.assert_allclose(prediction.grad.double().abs().sum(), expected[f"grad_abs_sum_p{level}"], rtol=1e-5)


# Oracles


def oracle_assignment(targets: Tensor, anchor_t: float, size_hw: tuple[int, int]) -> list[list[tuple[int, ...]]]:
    """Per level, (image, anchor, y, x, target) in the documented order."""
    levels = []
    for level_anchors, stride in zip(_grid_anchors().numpy(), (8, 16, 32), strict=True):
        ny, nx = size_hw[0] // stride, size_hw[1] // stride
        found = []
        for dx, dy in ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1)):
            for a, (aw, ah) in enumerate(level_anchors):
                for t, (image, _, x1, y1, x2, y2) in enumerate(targets.numpy()):
                    left, top, w, h = x1 / stride, y1 / stride, (x2 / stride - x1 / stride), (y2 / stride - y1 / stride)
                    x, y = left + w / 2, top + h / 2
                    if not (aw < anchor_t * w and w < anchor_t * aw and ah < anchor_t * h and h < anchor_t * ah):
                        continue
                    cx, cy = min(math.floor(x), nx - 1), min(math.floor(y), ny - 1)
                    near = {
                        (0, 0): True,
                        (-1, 0): x - cx < 0.5,
                        (0, -1): y - cy < 0.5,
                        (1, 0): x - cx > 0.5,
                        (0, 1): y - cy > 0.5,
                    }[dx, dy]
                    if near and 0 <= cx + dx < nx and 0 <= cy + dy < ny:
                        found.append((int(image), a, cy + dy, cx + dx, t))
        levels.append(found)
    return levels


SIZE_HW = (64, 96)
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
    assignment = DetectionLoss(Head(), load_hyp("hyp.scratch-low.yaml"), imgsz=96).assign(targets, 2, SIZE_HW)
    expected = oracle_assignment(targets, 4.0, SIZE_HW)
    assert assignment.positives_per_level == tuple(map(len, expected))

    taken = assignment.cells[:, assignment.candidate_cells].T.tolist()
    flat = [candidate for level in expected for candidate in level]
    assert taken == [list(candidate[:4]) for candidate in flat]
    assert assignment.classes.tolist() == [int(rows[candidate[4]][1]) for candidate in flat]

    first = 0
    last_candidates = assignment.last_candidates.split(assignment.cells_per_level)
    cells = assignment.cells.split(assignment.cells_per_level, dim=1)
    for level, level_last, level_cells in zip(expected, last_candidates, cells, strict=True):
        last = {candidate[:4]: first + position for position, candidate in enumerate(level)}
        assert dict(zip(map(tuple, level_cells.T.tolist()), level_last.tolist(), strict=True)) == last
        first += len(level)


def oracle_loss(predictions: list[Tensor], targets: Tensor, hyp: Hyp, nc: int, size_hw: tuple[int, int]) -> Tensor:
    """Box, obj, cls, one candidate at a time."""
    parts = torch.zeros(3)
    for level, candidates in enumerate(oracle_assignment(targets, hyp.anchor_t, size_hw)):
        p, stride = predictions[level], (8, 16, 32)[level]
        truth = torch.zeros(p.shape[:4])
        box, cls = [], []
        for image, a, y, x, t in candidates:
            row = p[image, a, y, x]
            x1, y1, x2, y2 = targets[t, 2:] / stride
            wanted = torch.stack(((x1 + x2) / 2 - x, (y1 + y2) / 2 - y, x2 - x1, y2 - y1))
            found = torch.cat((row[:2].sigmoid() * 2 - 0.5, (row[2:4].sigmoid() * 2) ** 2 * _grid_anchors()[level, a]))
            iou = complete_iou(found[None], wanted[None])[0]
            box.append(1 - iou)
            truth[image, a, y, x] = iou.detach().clamp(min=0)
            one_hot = F.one_hot(targets[t, 1].long(), nc).float()
            cls.append(F.binary_cross_entropy_with_logits(row[5:], one_hot))
        obj = F.binary_cross_entropy_with_logits(p[..., 4], truth)
        zero = p.sum() * 0
        mean = [torch.stack(part).mean() if part else zero for part in (box, cls)]
        parts = parts + torch.stack((mean[0], obj * (4.0, 1.0, 0.4)[level], mean[1]))
    return parts * torch.tensor(scaled_gains(hyp, nc=nc, nl=3, imgsz=96))


def test_loss_and_gradient_equal_plain_loops(hyp: Hyp) -> None:
    targets = random_targets(25, 2, SIZE_HW, 5)
    predictions = raw_predictions(2, SIZE_HW, 5)
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    assignment = criterion.assign(targets, 2, SIZE_HW)
    assert assignment.cells.shape[1] < len(assignment.candidate_cells), (
        "the case must hold cells that two candidates lie in"
    )
    loss, items = criterion(predictions, assignment)
    expected = oracle_loss(predictions, targets, hyp, 5, SIZE_HW)
    torch.testing.assert_close(items, expected.detach())
    ours, theirs = torch.autograd.grad(loss, predictions), torch.autograd.grad(expected.sum(), predictions)
    for grad, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-7)


# What must not matter


def test_a_batch_cut_over_ranks_gives_the_whole_batch(hyp: Hyp) -> None:
    size_hw, batch_size = (96, 96), 4
    targets = random_targets(40, batch_size, size_hw, 5)
    targets = targets[targets[:, 0] != 3]  # one rank has fewer objects, and its last image none
    whole = raw_predictions(batch_size, size_hw, 5)
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    loss, items = criterion(whole, criterion.assign(targets, batch_size, size_hw))
    gradients = torch.autograd.grad(loss, whole)

    ranks = []
    for images in (range(1), range(1, 4)):
        mine = targets[(targets[:, 0] >= images.start) & (targets[:, 0] < images.stop)].clone()
        mine[:, 0] -= images.start
        ranks.append((images, criterion.assign(mine, len(images), size_hw)))
    counts = torch.stack([assignment.counts for _, assignment in ranks]).sum(0)
    total_items = torch.zeros(3)
    for images, assignment in ranks:
        part = [p.detach()[images.start : images.stop].requires_grad_() for p in whole]
        part_loss, part_items = criterion(part, assignment, counts)
        total_items += part_items
        for grad, expected in zip(torch.autograd.grad(part_loss, part), gradients, strict=True):
            torch.testing.assert_close(grad, expected[images.start : images.stop], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(total_items, items, rtol=1e-6, atol=1e-8)


def test_memory_format_does_not_matter(hyp: Hyp) -> None:
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
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
    criterion = DetectionLoss(Head(nc=20), hyp, imgsz=320)
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


def test_the_device_part_waits_for_no_value(hyp: Hyp) -> None:
    """Meta tensors have no values: whatever would read one, or a shape that depends on one, raises."""
    hyp = replace(hyp, fl_gamma=1.5, obj_pw=2.0, cls_pw=2.0)
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    host = criterion.assign(random_targets(25, 2, SIZE_HW, 5), 2, SIZE_HW)
    assignment = Accelerator(torch.device("meta")).send(host)
    predictions = [p.detach().to("meta").requires_grad_() for p in raw_predictions(2, SIZE_HW, 5)]
    with torch.inference_mode():  # as validation may do before the first step of training
        criterion([p * 1 for p in predictions], assignment)
    loss, items = criterion(predictions, assignment)
    gradients = torch.autograd.grad(loss, predictions)
    assert items.shape == (3,) and [g.shape for g in gradients] == [p.shape for p in predictions]
    with pytest.raises((RuntimeError, NotImplementedError)):
        assignment.cells.nonzero().sum().item()


# Edges


@pytest.mark.parametrize("nc", [1, 5])
def test_a_batch_without_objects_still_has_every_gradient(hyp: Hyp, nc: int) -> None:
    criterion = DetectionLoss(Head(nc=nc), hyp, imgsz=96)
    predictions = raw_predictions(2, SIZE_HW, nc)
    loss, items = criterion(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    loss.backward()
    assert items[0] == 0 and items[1] > 0 and items[2] == 0
    for prediction in predictions:
        grad = prediction.grad
        assert grad is not None and grad.isfinite().all()
        assert (grad[..., 4] > 0).all()
        assert grad[..., :4].count_nonzero() == 0 and grad[..., 5:].count_nonzero() == 0


def test_a_level_without_positives_adds_nothing_to_box(hyp: Hyp) -> None:
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    small = torch.tensor([[0, 1, 30, 30, 39, 41]], dtype=torch.float32)
    assignment = criterion.assign(small, 2, SIZE_HW)
    assert assignment.positives_per_level[0] > 0 and assignment.positives_per_level[2] == 0
    predictions = raw_predictions(2, SIZE_HW, 5)
    loss, _ = criterion(predictions, assignment)
    gradients = torch.autograd.grad(loss, predictions)
    assert loss.isfinite() and gradients[2][..., :4].count_nonzero() == 0


def test_one_class_has_no_class_loss(hyp: Hyp) -> None:
    criterion = DetectionLoss(Head(nc=1), hyp, imgsz=96)
    predictions = raw_predictions(2, SIZE_HW, 1)
    loss, items = criterion(predictions, criterion.assign(random_targets(20, 2, SIZE_HW, 1), 2, SIZE_HW))
    gradients = torch.autograd.grad(loss, predictions)
    assert items[2] == 0 and all(g[..., 5].count_nonzero() == 0 for g in gradients)


def test_positive_weights_and_smoothing(hyp: Hyp) -> None:
    targets = random_targets(20, 2, SIZE_HW, 5)
    predictions = [p.detach() for p in raw_predictions(2, SIZE_HW, 5)]
    plain = DetectionLoss(Head(), hyp, imgsz=96)
    assignment = plain.assign(targets, 2, SIZE_HW)
    rows = torch.cat(
        [
            p[cells.unbind(0)]
            for p, cells in zip(predictions, assignment.cells.split(assignment.cells_per_level, 1), strict=True)
        ]
    )[assignment.candidate_cells]

    smooth = DetectionLoss(Head(), replace(hyp, cls_pw=3.0), imgsz=96, label_smoothing=0.2)
    truth = torch.full((len(rows), 5), 0.1)
    truth[range(len(rows)), assignment.classes] = 0.9
    logits = rows[:, 5:]
    expected = -(3 * truth * F.logsigmoid(logits) + (1 - truth) * F.logsigmoid(-logits))
    torch.testing.assert_close(smooth.sums(predictions, assignment)[:, 2].sum(), expected.sum())

    weighted = DetectionLoss(Head(), replace(hyp, obj_pw=3.0), imgsz=96)
    more = weighted.sums(predictions, assignment)[:, 1] - plain.sums(predictions, assignment)[:, 1]
    assert (more[:2] > 0).all(), "a positive weight counts positive cells more"
    nothing = plain.assign(torch.zeros(0, 6), 2, SIZE_HW)
    torch.testing.assert_close(weighted.sums(predictions, nothing), plain.sums(predictions, nothing))


def test_focal_loss(hyp: Hyp) -> None:
    """Without objects: 0.75 p^gamma BCE, whatever the sign conventions of the implementation."""
    criterion = DetectionLoss(Head(), replace(hyp, fl_gamma=1.5), imgsz=96)
    predictions = [p.detach() for p in raw_predictions(2, SIZE_HW, 5)]
    sums = criterion.sums(predictions, criterion.assign(torch.zeros(0, 6), 2, SIZE_HW))
    for level, p in enumerate(predictions):
        x = p[..., 4]
        torch.testing.assert_close(sums[level, 1], (0.75 * x.sigmoid() ** 1.5 * F.softplus(x)).sum())

    targets = random_targets(20, 2, SIZE_HW, 5)
    assignment = criterion.assign(targets, 2, SIZE_HW)
    rows = torch.cat(
        [
            p[cells.unbind(0)]
            for p, cells in zip(predictions, assignment.cells.split(assignment.cells_per_level, 1), strict=True)
        ]
    )[assignment.candidate_cells]
    hit = F.one_hot(assignment.classes, 5).bool()
    x = rows[:, 5:]
    expected = torch.where(
        hit, 0.25 * x.sigmoid().neg().add(1) ** 1.5 * F.softplus(-x), 0.75 * x.sigmoid() ** 1.5 * F.softplus(x)
    )
    torch.testing.assert_close(criterion.sums(predictions, assignment)[:, 2].sum(), expected.sum())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_saturated_logits_have_finite_gradients(hyp: Hyp, gamma: float) -> None:
    criterion = DetectionLoss(Head(), replace(hyp, fl_gamma=gamma), imgsz=96)
    assignment = criterion.assign(random_targets(20, 2, SIZE_HW, 5), 2, SIZE_HW)
    predictions = [(p.detach() * 200).requires_grad_() for p in raw_predictions(2, SIZE_HW, 5)]
    loss, _ = criterion(predictions, assignment)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, predictions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_are_summed_in_float32(hyp: Hyp, dtype: torch.dtype) -> None:
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    assignment = criterion.assign(random_targets(25, 2, SIZE_HW, 5), 2, SIZE_HW)
    half = [p.detach().to(dtype).requires_grad_() for p in raw_predictions(2, SIZE_HW, 5)]
    full = [p.detach().float().requires_grad_() for p in half]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, items = criterion(half, assignment)
    expected, expected_items = criterion(full, assignment)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(items, expected_items, rtol=0, atol=0)
    for grad, wanted in zip(torch.autograd.grad(loss, half), torch.autograd.grad(expected, full), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), wanted, rtol=1e-2, atol=1e-6)


def test_anchors_set_after_the_criterion_was_built_count(hyp: Hyp) -> None:
    head = Head()
    criterion = DetectionLoss(head, hyp, imgsz=96)
    targets = random_targets(25, 2, SIZE_HW, 5)
    criterion.assign(targets, 2, SIZE_HW)
    set_anchors(head, np.array(ANCHORS_PX) * 1.7)
    expected = DetectionLoss(head, hyp, imgsz=96).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)
    head.anchors = _grid_anchors()  # as `module.to(device)` replaces a buffer
    expected = DetectionLoss(Head(), hyp, imgsz=96).assign(targets, 2, SIZE_HW)
    assert torch.equal(criterion.assign(targets, 2, SIZE_HW).anchors, expected.anchors)


def test_targets_that_the_batch_cannot_hold_are_refused(hyp: Hyp) -> None:
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    row = [0, 1, 10, 10, 40, 40]
    with pytest.raises(AssertionError, match="image"):
        criterion.assign(torch.tensor([[2.0, *row[1:]]]), 2, SIZE_HW)
    with pytest.raises(AssertionError, match="class"):
        criterion.assign(torch.tensor([[0.0, 5.0, *row[2:]]]), 2, SIZE_HW)
    with pytest.raises(AssertionError):
        criterion(raw_predictions(2, (96, 96), 5), criterion.assign(torch.tensor([row]).float(), 2, SIZE_HW))


def test_scaled_gains_leave_the_hyperparameters_alone(hyp: Hyp) -> None:
    assert scaled_gains(hyp, nc=80, nl=3, imgsz=640) == pytest.approx((0.05, 1.0, 0.5))
    assert scaled_gains(hyp, nc=20, nl=4, imgsz=1280) == pytest.approx((0.0375, 3.0, 0.09375))


def test_objectness_balance() -> None:
    assert objectness_balance(3) == (4.0, 1.0, 0.4)
    assert objectness_balance(4) == (4.0, 1.0, 0.25, 0.06)
    assert objectness_balance(2) == (4.0, 1.0)
    with pytest.raises(ConfigError, match="6 inputs"):
        objectness_balance(6)


# Validation


def test_validation_losses_depend_neither_on_batches_nor_on_ranks(hyp: Hyp) -> None:
    targets = random_targets(40, 5, SIZE_HW, 5)
    predictions = [p.detach() for p in raw_predictions(5, SIZE_HW, 5)]
    criterion = DetectionLoss(Head(), hyp, imgsz=96)
    _, whole = criterion(predictions, criterion.assign(targets, 5, SIZE_HW))

    meters = [LossMeter(criterion), LossMeter(criterion), LossMeter(criterion)]
    for meter, images in ((meters[0], range(1)), (meters[1], range(1, 3)), (meters[0], range(3, 5))):
        mine = targets[(targets[:, 0] >= images.start) & (targets[:, 0] < images.stop)].clone()
        mine[:, 0] -= images.start
        part = [p[images.start : images.stop] for p in predictions]
        meter.update(part, criterion.assign(mine, len(images), SIZE_HW))
    merged = meters[0].losses(meter.total() for meter in meters)
    assert merged == pytest.approx(whole.tolist(), rel=1e-6)
    assert meters[2].losses() == (0.0, 0.0, 0.0)


def test_a_real_model_and_its_criterion_are_a_pair(hyp: Hyp) -> None:
    model = DetectionModel("yolov5n.yaml", nc=3).train()
    criterion = model.head.criterion(hyp, imgsz=64)
    predictions = model(torch.rand(2, 3, 64, 64))
    loss, _ = criterion(predictions, criterion.assign(torch.tensor([[1, 2, 4, 6, 40, 30.0]]), 2, (64, 64)))
    loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
