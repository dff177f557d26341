"""The interface of heads, tested on all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.deploy.exporting.network import RawNetwork
from tessera.models.detector import DetectionModel, predict_augmented
from tessera.models.heads.criterion import LOSS_HYPS, LossMeter, LossSettings, gather_rows
from tessera.models.heads.head import HeadSpec
from tessera.models.model_yaml import HEADS
from tessera.models.nms import NmsSettings, non_max_suppression
from tessera.utils.config import Hyp
from tessera.utils.errors import ConfigError
from tests.models.heads.made_models import ROWS, SIZE_HW, each_head, images, made, shares_of, weighted

ROOT = Path(__file__).resolve().parents[3]
weights = pytest.mark.parametrize("class_weights", [None, torch.tensor([0.5, 2, 1, 0.1])], ids=["plain", "weighted"])

REGIONS = [0, -1, 60, 0, 96, 40], [2, -1, 20, 20, 50, 64]
OBJECTS = [0, 1, 10, 10, 40, 50], [0, 2, 30, 5, 90, 60], [1, 0, 3, 3, 20, 30], [3, 3, 40, 8, 70, 40], [3, 1, 0, 0, 9, 9]
TARGETS = torch.tensor([*OBJECTS, *REGIONS]).float()
WEIGHTED = weighted(TARGETS)


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
        ("DetectYOLOX", ["nc", "Conv", 16], "has 3 arguments ['nc', 'Conv', 16], expected 1 to 2: [nc, conv]"),
        ("DetectYOLOX", ["nc", 16], "argument 'conv' is 16, expected one of Conv, DepthwiseSeparableConv"),
        ("DetectYOLOX", [80], "argument 'nc' is 80, expected one of nc"),
        ("DetectYOLOv9", ["nc", 64, 65], "argument 'reg_max' is 65, expected a whole number from 1 to 64"),
    ],
)
def test_wrong_arguments_of_a_head(kind: str, arguments: list[object], complaint: str) -> None:
    spec = HeadSpec(3, tuple(arguments), {}, (8, 8, 8), (8.0, 16.0, 32.0), f"m.yaml:9: layer 5 ({kind})")
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        HEADS[kind].from_spec(spec)


@each_head
@pytest.mark.parametrize("nc", [4, 1])
def test_a_head_names_the_hyperparameters_that_its_loss_reads(name: str, nc: int, hyp: Hyp) -> None:
    model = made(name, nc).train()
    targets = torch.tensor([[image, min(c, nc - 1), *box] for image, c, *box in OBJECTS]).float()
    outputs = model(images(4))

    def parts(**changed: float) -> list[float]:
        values: dict[str, Any] = {"topk": 4.0, "fl_gamma": 1.5, **changed}
        criterion = model.head.criterion(LossSettings.of(replace(hyp, **values), imgsz=640))
        _, found = criterion(outputs, criterion.assign(targets, 4, SIZE_HW))
        return list(found.tolist())

    changes = {"topk": 2.0, "fl_gamma": 0.5, "anchor_t": 1.5}
    read = {key for key in LOSS_HYPS if parts(**{key: changes.get(key, 0.7 * getattr(hyp, key))}) != parts()}
    assert read == model.head.loss_hyps(nc)


@each_head
@pytest.mark.parametrize(("nc", "off"), [(4, {}), (1, {}), (4, {"cls": 0.0})])
def test_a_loss_that_is_0_by_design_says_so(name: str, nc: int, off: dict[str, float], hyp: Hyp) -> None:
    model = made(name, nc).train()
    criterion = model.head.criterion(LossSettings.of(replace(hyp, **off), imgsz=640))  # type: ignore[arg-type]
    targets = torch.tensor([[image, min(c, nc - 1), *box] for image, c, *box in OBJECTS]).float()
    _, parts = criterion(model(images(4)), criterion.assign(targets, 4, SIZE_HW))
    zero = {own for own, part in zip(criterion.names, parts.tolist(), strict=True) if part == 0}
    assert zero == criterion.unused


@pytest.mark.parametrize("name", ROWS)
def test_a_head_without_branches_that_predict_once_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--end2end: this model's {name} has no one-to-one branch. Omit the"):
        made(name).head.strip_for_inference(end2end=True)


@each_head
def test_decoded_rows_are_boxes_and_probabilities(name: str) -> None:
    model = made(name).eval()
    with torch.no_grad():
        decoded, _ = model(images(2))
    head = model.head
    columns = 4 + head.has_objectness + head.nc
    assert decoded.shape == (2, sum(head.rows_per_level(SIZE_HW)), columns) and decoded.dtype == torch.float32
    assert ((decoded[..., 4:] >= 0) & (decoded[..., 4:] <= 1)).all()
    found = non_max_suppression(decoded, NmsSettings(0.0, 0.6, has_objectness=head.has_objectness))
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

    criterion = model.head.criterion(LossSettings.of(hyp, imgsz=96))
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


@each_head
@pytest.mark.parametrize("cuts", [[range(1), range(1, 4)], [range(i, i + 1) for i in range(4)]])
@weights
def test_losses_and_gradients_of_ranks_add_up_to_those_of_the_batch(
    name: str, hyp: Hyp, cuts: list[range], class_weights: Tensor | None
) -> None:
    model, targets = made(name).train(), TARGETS if class_weights is None else WEIGHTED
    criterion = model.head.criterion(LossSettings.of(hyp, imgsz=96, class_weights=class_weights))
    whole = [level.detach().requires_grad_() for level in model(images(4))]
    loss, parts = criterion(whole, criterion.assign(targets, 4, SIZE_HW))
    expected = torch.autograd.grad(loss, whole)
    assert parts.shape == (len(criterion.names),) and torch.isclose(parts.sum(), loss)

    shares = shares_of(targets, cuts)
    assignments = [criterion.assign(rows, len(cut), SIZE_HW) for rows, cut in zip(shares, cuts, strict=True)]
    counts = torch.stack([assignment.counts for assignment in assignments]).sum(0)
    slices = [[level.detach()[cut.start : cut.stop].requires_grad_() for level in whole] for cut in cuts]
    asked: list[Tensor] = []  # what a criterion sums over the ranks after the forward
    for raw, assignment in zip(slices, assignments, strict=True):
        criterion(raw, assignment, counts, lambda tensor: asked.append(tensor.clone()) or (lambda: tensor))
    assert not any(sums.is_floating_point() for sums in asked), "whole numbers add up in any order"
    total = torch.zeros_like(parts)
    for cut, raw, assignment in zip(cuts, slices, assignments, strict=True):
        mine, mine_parts = criterion(raw, assignment, counts, lambda _: lambda: torch.stack(asked).sum(0))
        total += mine_parts
        for grad, wanted in zip(torch.autograd.grad(mine, raw), expected, strict=True):
            torch.testing.assert_close(grad, wanted[cut.start : cut.stop], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(total, parts, rtol=1e-5, atol=1e-8)


@each_head
@weights
def test_validation_losses_depend_neither_on_batches_nor_on_ranks(
    name: str, hyp: Hyp, class_weights: Tensor | None
) -> None:
    model, targets = made(name).train(), TARGETS if class_weights is None else WEIGHTED
    criterion = model.head.criterion(LossSettings.of(hyp, imgsz=96, class_weights=class_weights))
    with torch.no_grad():
        whole = [level.detach() for level in model(images(4))]
        _, parts = criterion(whole, criterion.assign(targets, 4, SIZE_HW))
    cuts = [range(2), range(2, 3), range(3, 4)]
    meters = [LossMeter(criterion), LossMeter(criterion), LossMeter(criterion)]
    for meter, rows, cut in zip((meters[0], meters[1], meters[0]), shares_of(targets, cuts), cuts, strict=True):
        meter.update([level[cut.start : cut.stop] for level in whole], criterion.assign(rows, len(cut), SIZE_HW))
    assert meters[0].losses(meter.total() for meter in meters) == pytest.approx(parts.tolist(), rel=1e-5)
    assert meters[2].losses([meters[2].total()]) == (0.0,) * len(criterion.names)


@each_head
def test_a_batch_is_learnt(name: str, hyp: Hyp) -> None:
    model = made(name).train()
    criterion = model.head.criterion(LossSettings.of(hyp, imgsz=96))
    assignment = criterion.assign(TARGETS, 4, SIZE_HW)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = []
    for _ in range(12):
        loss, _ = criterion(model(images(4)), assignment)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.8 * seen[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("count", [2016, 2017, 3072, 3073])
def test_gathered_rows_avoid_the_race_of_cuda(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cells = torch.randn(500, 8, requires_grad=True), torch.randint(0, 500, (count,))
    grad, used, embedding = torch.randn(count, 8), [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda cells, rows: used.append(len(cells)) or embedding(cells, rows))
    found, expected = gather_rows(rows, cells), embedding(cells, rows)
    assert used[0] not in range(2017, 3073) and torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(one, rows, grad)[0] for one in (found, expected)))


@pytest.mark.parametrize("name", ROWS)
def test_a_trace_computes_on_the_device_of_its_images(name: str) -> None:
    traced = torch.jit.trace(RawNetwork(made(name)), images(1), check_trace=False)
    assert traced.to("meta")(images(1).to("meta")).is_meta
