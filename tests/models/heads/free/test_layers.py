"""Decoding and initialisation of the anchor-free head."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.grid import make_grid
from tests.models.heads.free.made import HYP, SHAPES_HW, SIZE_HW, features, made_head
from tests.models.heads.free.oracle import STRIDES, cells_of, decode


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
