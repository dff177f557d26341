"""Ignored regions: no head learns inside them, and overlapping objects are learnt as usual."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.grid import region_cells, sets_of_cells
from tessera.utils.config import load_hyp
from tests.models.heads.free_oracle import STRIDES, cells_of, inside
from tests.models.heads.made_models import ONCE, SIZE_HW, each_head, images, made

HYP = load_hyp("hyp.scratch-low.yaml")
OBJECTS = [[0, 1, 10, 10, 40, 50], [0, 2, 50, 5, 90, 60], [1, 0, 3, 3, 20, 30]]


def targets(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)


def gradients(model: DetectionModel, raw: list[Tensor], rows: Tensor, unlabelled: Tensor | None = None) -> list[Tensor]:
    """Of the loss by each output, as (B, A, …): a row for each prediction, anchors of a cell side by side."""
    outputs = [output.detach().requires_grad_() for output in raw]
    criterion = model.head.criterion(LossSettings.of(HYP, imgsz=96))
    loss, parts = criterion(outputs, criterion.assign(rows, len(raw[0]), SIZE_HW, unlabelled))
    assert loss.isfinite() and torch.isclose(parts.sum(), loss)
    found = torch.autograd.grad(loss, outputs)
    if found[0].ndim == 3:
        return list(found)
    return [torch.cat([level.permute(0, 2, 3, 1, 4).flatten(1, 2) for level in found], 1)]


@pytest.fixture(scope="module")
def centres() -> Tensor:
    return cells_of(SIZE_HW)[0]


@each_head
def test_inside_a_region_all_gradients_are_zero_and_outside_nothing_changes(name: str, centres: Tensor) -> None:
    model = made(name).train()
    raw = model(images(3))
    region = torch.tensor([20.0, 12.0, 84.0, 60.0])
    without = gradients(model, raw, targets(*OBJECTS))
    found = gradients(model, raw, targets(*OBJECTS, [2, -1, *region.tolist()]))
    within = inside(region, centres)
    assert 10 < int(within.sum()) < len(centres)
    for gradient, before in zip(found, without, strict=True):
        assert not gradient[2, within].any(), "exactly zero"
        assert torch.equal(gradient[:2], before[:2])
    assert any(before[2, within].any() for before in without), "background is learnt without the region"
    outside = [
        (gradient[2, ~within] - before[2, ~within]).abs().flatten(1).sum(1)
        for gradient, before in zip(found, without, strict=True)
    ]
    # A head with anchors does not learn the cells beside the region's centre either, which would find it.
    assert all(int((difference > 0).sum()) <= 4 for difference in outside)


@each_head
def test_an_object_of_weight_1_is_an_object_and_one_of_weight_0_an_ignored_region(name: str) -> None:
    model = made(name).train()
    raw, (first, second, third) = model(images(3)), OBJECTS
    one, zero = (gradients(model, raw, targets([*first, 1], [*second, w], [*third, 1])) for w in (1, 0))
    assert all(map(torch.equal, one, gradients(model, raw, targets(*OBJECTS))))
    region = gradients(model, raw, targets(first, [0, -1, *second[2:]], third))
    torch.testing.assert_close(zero, region, rtol=1e-5, atol=1e-7)
    near = [first[0], 3 - first[1], first[2] + 1, *first[3:], 0]  # of the same predictions
    region = gradients(model, raw, targets(*OBJECTS, [near[0], -1, *near[2:6]]))
    orders = ([near, [*first, 1]], [[*first, 1], near])
    for objects in orders:
        found = gradients(model, raw, targets(*objects, [*second, 1], [*third, 1]))
        torch.testing.assert_close(found, region, rtol=1e-5, atol=1e-7)


@each_head
def test_an_object_in_a_region_is_learnt_as_without_it(name: str) -> None:
    model = made(name).train()
    raw = model(images(3))
    whole = [[image, -1, 0, 0, 96, 64] for image in range(3)]
    without, found = gradients(model, raw, targets(*OBJECTS)), gradients(model, raw, targets(*OBJECTS, *whole))
    of_a_kind = len(found) // (2 if name == ONCE else 1)  # branches that predict an object once have fewer matches
    for at in range(0, len(found), of_a_kind):
        matched = without[at][..., :4].any(-1, keepdim=True)  # only these learn where their box is
        assert matched.sum() >= 3
        for gradient, before in zip(found[at : at + of_a_kind], without[at : at + of_a_kind], strict=True):
            assert torch.equal(gradient, torch.where(matched, before, 0))


@each_head
def test_classes_without_labels_have_no_loss_outside_of_objects(name: str, centres: Tensor) -> None:
    """The gradient is the full one without the terms left out, in a mosaic of four sets with an ignored region.

    Image 0 labels all classes, the left of image 1 all but two, its right none; image 2 is a mixup of two sets.
    """
    model = made(name).train()
    raw = model(images(3))
    nc = model.head.nc
    unlabelled = torch.zeros(3, nc, dtype=torch.bool)
    unlabelled[0, [0, 2]], unlabelled[1], unlabelled[2, [1]] = True, True, True
    regions = [[1, -2, 0, 0, 40, 64], [1, -3, 40, 0, 96, 64], [2, -2, 0, 0, 96, 64], [2, -4, 0, 0, 96, 64]]
    ignored = [1, -1, 0, 32, 64, 64]
    without = gradients(model, raw, targets(*OBJECTS))
    found = gradients(model, raw, targets(*OBJECTS, *regions, ignored), unlabelled)
    left_out = torch.zeros(3, len(centres), nc, dtype=torch.bool)
    for image, c, *corners in [*regions, ignored]:
        left_out[image, inside(torch.tensor(corners).double(), centres)] |= unlabelled[-2 - c] if c < -1 else True
    of_a_kind = len(found) // (2 if name == ONCE else 1)
    for at in range(0, len(found), of_a_kind):
        matched = without[at][..., :4].any(-1, keepdim=True)
        for gradient, before in zip(found[at : at + of_a_kind], without[at : at + of_a_kind], strict=True):
            removed = left_out
            if model.head.has_objectness or gradient.shape[2] != nc:
                removed = removed.any(2, keepdim=True)
            if gradient.ndim == 4:  # anchors; those beside the ignored region that would predict it do not learn either
                removed = removed[..., None]
                beside = (gradient == 0).all(-1, keepdim=True) & ~matched & ~removed
                assert not beside[[0, 2]].any() and int(beside.any(2).sum()) <= 4
                removed = removed | beside
            assert torch.equal(gradient, torch.where(matched | ~removed, before, 0))


def test_cells_have_the_union_of_the_sets_around_them() -> None:
    sets = np.array([[True, False, False], [False, True, False]])
    rows = np.array([[0, -2, 0, 0, 64, 64], [0, -3, 32, 0, 96, 64], [1, -3, 0, 0, 16, 16]], np.float32)
    grids = [(SIZE_HW[0] // s, SIZE_HW[1] // s) for s in STRIDES]
    of_cell, unions = sets_of_cells(rows, sets, STRIDES, 3, grids)
    centres, _ = cells_of(SIZE_HW)
    expected = torch.zeros(3, len(centres), 3, dtype=torch.bool)
    of_cells = np.concatenate([level.reshape(3, -1) for level in of_cell], 1)
    for image, c, *corners in rows.tolist():
        expected[int(image), inside(torch.tensor(corners), centres)] |= torch.from_numpy(sets[-2 - int(c)])
    assert np.array_equal(unions[of_cells], expected.numpy()) and not unions[0].any()


@each_head
def test_a_batch_of_nothing_but_regions_has_no_loss(name: str) -> None:
    model = made(name).train()
    assert not any(g.any() for g in gradients(model, model(images(1)), targets([0, -1, -5, -5, 101, 70])))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), *[st.floats(-20, 120, width=32)] * 2, *[st.floats(0, 90, width=32)] * 2)))
def test_cells_are_those_whose_centre_lies_inside(boxes: list[tuple[float, ...]]) -> None:
    rows = np.array([[i, -1, x, y, x + w, y + h] for i, x, y, w, h in boxes], np.float32).reshape(-1, 6)
    centres, _ = cells_of(SIZE_HW)
    found = region_cells(rows, STRIDES, 3, [(SIZE_HW[0] // s, SIZE_HW[1] // s) for s in STRIDES])
    expected = torch.zeros(3, len(centres), dtype=torch.bool)
    for row in rows:
        expected[int(row[0])] |= inside(torch.from_numpy(row[2:]).double(), centres)
    assert np.array_equal(np.concatenate([level.reshape(3, -1) for level in found], 1), expected.numpy())
