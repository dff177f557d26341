"""Box conversion, clipping and IoU, on torch tensors.

Boxes are float32. `xyxy` = left, top, right, bottom; `cxcywh` = centre, width, height. The unit is pixels unless a name
ends in n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_EPS = 1e-7


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert (..., 4) centre and size to corners."""
    half = boxes[..., 2:] / 2
    return torch.cat((boxes[..., :2] - half, boxes[..., :2] + half), -1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Convert (..., 4) corners to centre and size."""
    size = boxes[..., 2:] - boxes[..., :2]
    return torch.cat((boxes[..., :2] + size / 2, size), -1)


def clip_boxes(boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Return (..., 4) boxes clipped to an image of (height, width) pixels."""
    height, width = size_hw
    x0, y0, x1, y1 = boxes_xyxy.unbind(-1)
    return torch.stack((x0.clamp(0, width), y0.clamp(0, height), x1.clamp(0, width), y1.clamp(0, height)), -1)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU of matching rows: (N, 4) and (N, 4) corners to (N,)."""
    common = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
    overlap = common[:, 0] * common[:, 1]
    area_a, area_b = (size[:, 0] * size[:, 1] for size in (a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]))
    return overlap / (area_a + area_b - overlap + _EPS)


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the complete IoU of matching rows: (N, 4) and (N, 4) cxcywh to (N,).

    CIoU = IoU − ρ²/c² − αv with v = 4/π² (atan w/h − atan w'/h')² and α = v / (v − IoU + 1), constant in the gradient
    (Zheng et al., Distance-IoU Loss, AAAI 2020). `torchvision.ops.complete_box_iou_loss` is NaN for some equal boxes,
    and takes corners.
    """
    return complete_iou_of_pairs(*torch.stack((a, b)).split(2, -1))


def complete_iou_of_pairs(centres: Tensor, sizes: Tensor) -> Tensor:
    """Return `complete_iou` of centres and sizes, (2, N, 2) each, in half as many kernels."""
    corners = torch.cat((torch.sub(centres, sizes, alpha=0.5), torch.add(centres, sizes, alpha=0.5)), -1)
    low, high = corners.amin(0).split(2, -1), corners.amax(0).split(2, -1)
    width, height = (low[1] - high[0]).clamp(min=0).unbind(-1)
    overlap = width * height  # the backward of prod() synchronises the device
    width, height = sizes.unbind(-1)
    area_a, area_b = width * height
    iou = overlap / (area_a + area_b - overlap + _EPS)
    centre_a, centre_b = centres
    diagonal2, distance2 = torch.stack((high[1] - low[0], centre_a - centre_b)).square().sum(-1)
    angle_a, angle_b = torch.atan(width / (height + _EPS))
    v = (4 / math.pi**2) * (angle_a - angle_b).square()
    with torch.no_grad():
        # Rounding may give equal boxes an IoU above 1. Without the clamp, 0 / 0 would make the loss NaN.
        alpha = v / (v - iou + (1 + _EPS)).clamp(min=_EPS)
    return iou - distance2 / (diagonal2 + _EPS) - alpha * v
