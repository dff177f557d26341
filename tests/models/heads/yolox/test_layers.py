"""Largest boxes and initialisation of YOLOX's head."""

from __future__ import annotations

import math

import pytest
import torch

from tessera.models.heads.grid import make_grid
from tessera.models.heads.yolox import LARGEST_LOG
from tests.models.heads.free.made import SHAPES_HW, SIZE_HW, features
from tests.models.heads.free.oracle import STRIDES, cells_of
from tests.models.heads.yolox.oracle import made_head


def test_a_box_is_as_large_as_its_offsets_say_up_to_what_suppression_can_compare() -> None:
    grid = make_grid(SHAPES_HW, STRIDES, torch.zeros(0))
    for offset, meant in ((12.0, 12.0), (1e4, LARGEST_LOG)):
        found = made_head().boxes(torch.full((1, len(grid.centres), 4), offset), grid)
        torch.testing.assert_close(found[0, 0, 2:], torch.full((2,), 8 * math.exp(meant)))
    assert found.square().isfinite().all()


@pytest.mark.parametrize("nc", [1, 80])
def test_a_fresh_head_draws_boxes_of_four_strides_in_its_cells_at_the_odds_of_a_dataset(nc: int) -> None:
    torch.manual_seed(0)
    head = made_head(nc).eval()
    with torch.no_grad():
        decoded, _ = head(features())
    centres, strides = cells_of(SIZE_HW)
    assert ((decoded[..., 2:4] / strides[:, None] - 4).abs() < 0.5).all()
    assert ((decoded[..., :2] - centres).abs() < 0.5 * strides[:, None]).all()
    torch.testing.assert_close(decoded[..., 5:].mean(), torch.tensor(1 / (nc + 1)), rtol=0.05, atol=0)
    for level, stride in zip(decoded.split(head.rows_per_level(SIZE_HW), 1), STRIDES, strict=True):
        assert 7 < float(level[..., 4].mean()) * (640 / stride) ** 2 < 9
