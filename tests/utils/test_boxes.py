"""Box arithmetic against what the words mean."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import complete_box_iou_loss

from tessera.data.augment import geometry
from tessera.data.source.scan import corners_of
from tessera.utils.boxes import clip_boxes, complete_iou, cxcywh_to_xyxy, xyxy_to_cxcywh

sides = st.floats(0.5, 100, width=32)


@given(st.lists(st.tuples(sides, sides, sides, sides), min_size=1, max_size=8))
def test_conversions_are_inverse_for_tensors_and_arrays(rows: list[tuple[float, ...]]) -> None:
    boxes = torch.tensor(rows)
    corners = cxcywh_to_xyxy(boxes)
    torch.testing.assert_close(xyxy_to_cxcywh(corners), boxes, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(corners_of(boxes.numpy()), corners.numpy())
    assert (corners[:, 2:] > corners[:, :2]).all()


@given(st.lists(st.tuples(sides, sides, sides, sides), min_size=2, max_size=6))
def test_complete_iou_is_torchvisions(rows: list[tuple[float, ...]]) -> None:
    a = torch.tensor(rows)
    b = a.flip(0)
    ours = complete_iou(a, b)
    assert torch.isfinite(ours).all()
    expected = 1 - complete_box_iou_loss(cxcywh_to_xyxy(a), cxcywh_to_xyxy(b))
    known = torch.isfinite(expected)  # torchvision's own is 0 / 0 for some equal boxes
    torch.testing.assert_close(ours[known], expected[known], rtol=1e-3, atol=1e-3)


def test_clip_for_tensors_and_arrays() -> None:
    boxes = np.array([[-5, -5, 30, 30], [3, 4, 5, 6]], np.float32)
    expected = np.array([[0, 0, 20, 10], [3, 4, 5, 6]], np.float32)
    np.testing.assert_array_equal(geometry.clip_boxes(boxes, (10, 20)), expected)
    np.testing.assert_array_equal(clip_boxes(torch.from_numpy(boxes), (10, 20)).numpy(), expected)
