"""What any head must do, tried on all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion, LossMeter
from tessera.models.heads.head import HeadSpec
from tessera.models.model_yaml import HEADS
from tessera.models.nms import Suppression, non_max_suppression
from tessera.models.tta import predict_augmented
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.errors import ConfigError
from tests.models.heads.made_models import ROWS, SIZE_HW, each_head, images, made, shares_of

ROOT = Path(__file__).resolve().parents[3]
weights = pytest.mark.parametrize("class_weights", [None, torch.tensor([0.5, 2, 1, 0.1])], ids=["plain", "weighted"])


@pytest.fixture(scope="module")
def hyp() -> Hyp:
    return load_hyp("hyp.scratch-low.yaml")


TARGETS = torch.tensor(
    [
        *(
            [0, 1, 10, 10, 40, 50],
            [0, 2, 30, 5, 90, 60],
            [1, 0, 3, 3, 20, 30],
            [3, 3, 40, 8, 70, 40],
            [3, 1, 0, 0, 30, 30],
        ),
        *([0, -1, 60, 0, 96, 40], [2, -1, 20, 20, 50, 64]),
    ],
    dtype=torch.float32,
)


def test_each_head_has_a_row() -> None:
    assert set(HEADS) == set(ROWS)


def test_only_the_list_of_heads_and_other_heads_import_a_head() -> None:
    files = [path for folder in ("data", "models", "utils") for path in (ROOT / folder).rglob("*.py")]
    heads = ROOT / "models" / "heads"
    for path in {*files, *ROOT.glob("*.py")} - {*heads.rglob("*.py"), ROOT / "models" / "model_yaml.py"}:
        named = re.findall(r"tessera\.models\.heads\.(\w+)", path.read_text())
        assert set(named) <= {"criterion", "head"}, path


def test_the_keys_of_a_yaml_are_those_of_its_head() -> None:
    model = made("DetectFree")
    assert "anchors" not in model.yaml and DetectionModel(model.yaml).nc == 4
    with pytest.raises(ConfigError, match="unknown key 'anchors'"):
        DetectionModel({**model.yaml, "anchors": 3})
    without = {key: value for key, value in made("Detect").yaml.items() if key != "anchors"}
    with pytest.raises(ConfigError, match="the key 'anchors' is missing"):
        DetectionModel(without)


@pytest.mark.parametrize(
    ("kind", "arguments", "complaint"),
    [
        ("DetectFree", [], "has 0 arguments [], expected 1 to 4: [nc, reg_max, depth, end2end]"),
        ("DetectFree", ["anchors"], "argument 'nc' is 'anchors', expected one of nc"),
        ("DetectFree", ["nc", 0], "argument 'reg_max' is 0, expected a whole number from 1 to 64"),
        ("DetectFree", ["nc", 65], "argument 'reg_max' is 65, expected a whole number from 1 to 64"),
        ("DetectFree", ["nc", 16, True], "argument 'depth' is True, expected a whole number"),
        ("DetectFree", ["nc", 16, 9], "argument 'depth' is 9, expected a whole number from 1 to 8"),
        ("DetectFree", ["nc", 16, 1, 1], "argument 'end2end' is 1, expected true or false"),
        ("DetectYOLOX", [], "has 0 arguments [], expected 1: [nc]"),
        ("DetectYOLOX", ["nc", 16], "has 2 arguments ['nc', 16], expected 1: [nc]"),
        ("DetectYOLOX", [80], "argument 'nc' is 80, expected one of nc"),
        ("DetectYOLOv9", ["nc", 64, 65], "argument 'reg_max' is 65, expected a whole number from 1 to 64"),
    ],
)
def test_wrong_arguments_of_a_head(kind: str, arguments: list[object], complaint: str) -> None:
    spec = HeadSpec(3, tuple(arguments), {}, (8, 8, 8), (8.0, 16.0, 32.0), f"m.yaml:9: layer 5 ({kind})")
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        HEADS[kind].from_spec(spec)


@pytest.mark.parametrize("name", ROWS)
def test_a_head_without_branches_that_predict_once_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--end2end: this model's {name} has no one-to-one branch. Leave the"):
        made(name).head.keep_inference(end2end=True)


@each_head
def test_decoded_rows_are_boxes_and_probabilities(name: str) -> None:
    model = made(name).eval()
    with torch.no_grad():
        decoded, _ = model(images(2))
    head = model.head
    columns = 4 + head.has_objectness + head.nc
    assert decoded.shape == (2, sum(head.rows_per_level(SIZE_HW)), columns) and decoded.dtype == torch.float32
    assert ((decoded[..., 4:] >= 0) & (decoded[..., 4:] <= 1)).all()
    found = non_max_suppression(decoded, Suppression(0.0, 0.6, has_objectness=head.has_objectness))
    assert all(int(d.classes.max()) < head.nc for d in found)
    assert predict_augmented(model, images(2)).shape[2] == columns


@each_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_decoded_and_trained_in_float32(name: str, hyp: Hyp, dtype: torch.dtype) -> None:
    model = made(name).eval()
    with torch.no_grad():
        expected, raw = model(images(4))
        with torch.autocast("cpu", dtype):
            decoded, lower = model(images(4))
    assert decoded.dtype == torch.float32 and lower[0].dtype == dtype
    torch.testing.assert_close(decoded, expected, atol=0.5, rtol=0.05)

    criterion = model.head.criterion(hyp, imgsz=96)
    assignment = criterion.assign(TARGETS, 4, SIZE_HW)
    half = [level.to(dtype).requires_grad_() for level in raw]
    full = [level.detach().float().requires_grad_() for level in half]
    with torch.autocast("cpu", torch.bfloat16):
        loss, parts = criterion(half, assignment)
    right, its_parts = criterion(full, assignment)
    assert loss.dtype == torch.float32 and torch.equal(parts, its_parts)
    for grad, wanted in zip(torch.autograd.grad(loss, half), torch.autograd.grad(right, full), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), wanted, rtol=1e-2, atol=1e-3)


def test_without_objectness_a_score_is_the_class_probability() -> None:
    rows = torch.tensor([[10, 10, 8, 8, 0.9, 0.3], [50, 50, 8, 8, 0.1, 0.2], [90, 90, 8, 8, 0.05, 0.6]])[None]
    (found,) = non_max_suppression(rows, Suppression(0.25, 0.5, has_objectness=False))
    torch.testing.assert_close(found.scores, torch.tensor([0.9, 0.6, 0.3]))
    assert found.classes.tolist() == [0, 1, 1]
    with_objectness = torch.cat((rows[..., :4], torch.ones(1, 3, 1), rows[..., 4:]), 2)
    (same,) = non_max_suppression(with_objectness, Suppression(0.25, 0.5))
    assert torch.equal(found.boxes_xyxy, same.boxes_xyxy) and torch.equal(found.scores, same.scores)


def summed(shares: list[Tensor]) -> Callable[[Tensor], Callable[[], Tensor]]:
    """A sum over ranks whose other shares are known."""
    return lambda tensor: lambda: torch.stack(shares).sum(0)


def weights_asked(criterion: Criterion[Any], raw: list[Tensor], assignment: Any) -> list[Tensor]:
    """What a criterion sums over the ranks after the forward."""
    asked: list[Tensor] = []

    def remember(tensor: Tensor) -> Callable[[], Tensor]:
        asked.append(tensor.clone())
        return lambda: tensor

    criterion(raw, assignment, assignment.counts, remember)
    return asked


@each_head
@weights
def test_losses_and_gradients_of_ranks_add_up_to_those_of_the_batch(
    name: str, hyp: Hyp, class_weights: Tensor | None
) -> None:
    model = made(name).train()
    criterion = model.head.criterion(hyp, imgsz=96, class_weights=class_weights)
    whole = [level.detach().requires_grad_() for level in model(images(4))]
    loss, parts = criterion(whole, criterion.assign(TARGETS, 4, SIZE_HW))
    expected = torch.autograd.grad(loss, whole)
    assert parts.shape == (len(criterion.names),) and torch.isclose(parts.sum(), loss)

    cuts = [range(1), range(1, 4)]
    shares = shares_of(TARGETS, cuts)
    assignments = [criterion.assign(rows, len(cut), SIZE_HW) for rows, cut in zip(shares, cuts, strict=True)]
    counts = torch.stack([assignment.counts for assignment in assignments]).sum(0)
    slices = [[level.detach()[cut.start : cut.stop].requires_grad_() for level in whole] for cut in cuts]
    asked = [weights_asked(criterion, raw, a) for raw, a in zip(slices, assignments, strict=True)]
    total = torch.zeros_like(parts)
    for cut, raw, assignment in zip(cuts, slices, assignments, strict=True):
        mine, mine_parts = criterion(raw, assignment, counts, summed([a[0] for a in asked] if asked[0] else []))
        total += mine_parts
        for grad, wanted in zip(torch.autograd.grad(mine, raw), expected, strict=True):
            torch.testing.assert_close(grad, wanted[cut.start : cut.stop], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(total, parts, rtol=1e-5, atol=1e-8)


@each_head
@weights
def test_validation_losses_depend_neither_on_batches_nor_on_ranks(
    name: str, hyp: Hyp, class_weights: Tensor | None
) -> None:
    model = made(name).train()
    criterion = model.head.criterion(hyp, imgsz=96, class_weights=class_weights)
    with torch.no_grad():
        whole = [level.detach() for level in model(images(4))]
        _, parts = criterion(whole, criterion.assign(TARGETS, 4, SIZE_HW))
    cuts = [range(2), range(2, 3), range(3, 4)]
    meters = [LossMeter(criterion), LossMeter(criterion), LossMeter(criterion)]
    for meter, rows, cut in zip((meters[0], meters[1], meters[0]), shares_of(TARGETS, cuts), cuts, strict=True):
        meter.update([level[cut.start : cut.stop] for level in whole], criterion.assign(rows, len(cut), SIZE_HW))
    assert meters[0].losses(meter.total() for meter in meters) == pytest.approx(parts.tolist(), rel=1e-5)
    assert meters[2].losses([meters[2].total()]) == (0.0,) * len(criterion.names)


@each_head
def test_class_weights_count_in_the_class_losses_alone(name: str, hyp: Hyp) -> None:
    """Every loss of classes, of each kind of branches, is linear in the weights; weights of 1 are none."""
    model = made(name).train()
    with torch.no_grad():
        raw = model(images(4))
        found = []
        for class_weights in (None, *(torch.tensor([1, of_class_1, 1, 1]) for of_class_1 in (1.0, 2.0, 3.0))):
            criterion = model.head.criterion(hyp, imgsz=96, class_weights=class_weights)
            found.append(criterion(raw, criterion.assign(TARGETS, 4, SIZE_HW))[1])
    plain, ones, twice, thrice = found
    assert torch.equal(plain, ones)
    torch.testing.assert_close(thrice - twice, twice - ones, rtol=1e-3, atol=1e-6)
    assert [bool(more > 0) for more in twice - ones] == ["cls" in name for name in criterion.names]


@each_head
def test_a_batch_is_learnt(name: str, hyp: Hyp) -> None:
    model = made(name).train()
    criterion = model.head.criterion(hyp, imgsz=96)
    assignment = criterion.assign(TARGETS, 4, SIZE_HW)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = []
    for _ in range(25):
        loss, _ = criterion(model(images(4)), assignment)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.8 * seen[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
