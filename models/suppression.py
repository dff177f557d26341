"""Decoded predictions become detections, in pixels of the original image.

Legend: B images, A predictions of an image, C classes, K candidates (a box with one of its labels), D detections.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms

from utils.boxes import clip_boxes, cxcywh_to_xyxy
from utils.types import Detections


def non_max_suppression(
    decoded: Tensor,
    conf: float,
    iou: float,
    *,
    has_objectness: bool = True,
    max_det: int = 300,
    multi_label: bool = True,
    agnostic: bool = False,
    max_candidates: int = 30_000,
    widest: torch.dtype = torch.float64,
) -> list[Detections]:
    """Greedy non-maximum suppression, image by image; no image's result depends on the others'.

    A score is the class probability, times objectness where a head has one. Equal scores keep the order of the
    predictions, so the result is determined. There is no time limit: a slow machine finds what a fast one finds.

    Args:
        decoded: (B, A, 5 + C), rows centre x, centre y, width, height in pixels, objectness, class probabilities; or
            (B, A, 4 + C), the same without objectness.
        conf: objectness and score must exceed it.
        iou: a box goes where it overlaps a better one by more than this.
        has_objectness: whether rows have an objectness (`Head.has_objectness`).
        max_det: most detections an image.
        multi_label: every class above `conf` makes a candidate, not the best one alone; needs more than one class.
        agnostic: boxes of different classes compete too.
        max_candidates: only so many, the best by score, enter an image's suppression.
        widest: float type to move classes apart in: the accelerator's widest.

    Returns:
        B detections, on the device of `decoded`, descending by score.
    """
    assert 0 <= conf <= 1 and 0 <= iou <= 1, (conf, iou)
    nc = decoded.shape[2] - (5 if has_objectness else 4)
    with torch.no_grad():
        candidates = (
            _candidates(*_scored(rows, conf, has_objectness), conf, multi_label and nc > 1, max_candidates)
            for rows in decoded
        )
        return [_suppress(found, iou, max_det, agnostic, widest) for found in candidates]


def undo_letterbox(detections: Detections, placement: Tensor, size_hw: tuple[int, int]) -> Detections:
    """Boxes in pixels of the original image, clipped to it.

    Args:
        detections: in pixels of the network's input.
        placement: (4,) scale_x, scale_y, left, top of that image in the batch.
        size_hw: height and width of the original.
    """
    scale_x, scale_y, left, top = placement.tolist()
    boxes = detections.boxes_xyxy
    moved = (boxes - boxes.new_tensor((left, top, left, top))) / boxes.new_tensor((scale_x, scale_y, scale_x, scale_y))
    return Detections(clip_boxes(moved, size_hw), detections.scores, detections.classes)


def _scored(rows: Tensor, conf: float, has_objectness: bool) -> tuple[Tensor, Tensor]:
    """Boxes (K, 4) cxcywh and the scores (K, C) of their classes, in float32: the rows that can have a score > conf."""
    # No class probability exceeds 1: what fails here cannot pass later, and it is nearly everything.
    bound = rows[:, 4] if has_objectness else rows[:, 4:].amax(1)
    rows = rows[bound.float() > conf].float()
    return rows[:, :4], rows[:, 5:] * rows[:, 4:5] if has_objectness else rows[:, 4:]


def _candidates(
    boxes: Tensor, scores: Tensor, conf: float, multi_label: bool, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (K, 4) xyxy, scores (K,) and classes (K,) of one image, descending by score, K <= most."""
    if multi_label:
        index, classes = (scores > conf).nonzero(as_tuple=True)
        scores = scores[index, classes]
    else:
        scores, classes = scores.max(1)
        index = (scores > conf).nonzero().squeeze(1)
        scores, classes = scores[index], classes[index]
    if len(scores) > most:
        # topk leaves open which of equal scores it takes; its smallest value decides nothing but how much is sorted.
        strong = (scores >= scores.topk(most, sorted=False).values.min()).nonzero().squeeze(1)
        index, scores, classes = index[strong], scores[strong], classes[strong]
    order = scores.argsort(descending=True, stable=True)[:most]
    return cxcywh_to_xyxy(boxes[index[order]]), scores[order], classes[order]


def _suppress(
    candidates: tuple[Tensor, Tensor, Tensor], iou: float, max_det: int, agnostic: bool, widest: torch.dtype
) -> Detections:
    """Greedy suppression of candidates in descending order of score.

    Whether a box stays depends on better ones alone, so the survivors of the first k candidates are the first survivors
    of all. Where `max_det` of them are found among a few thousand, the other tens of thousands need not be compared.
    """
    # In float64 a class can be moved out of the others' way without rounding a single overlap.
    boxes, scores, classes = candidates
    apart = boxes.to(widest)
    if not agnostic and len(boxes):
        apart = apart + (classes * (apart.max() - apart.min() + 1))[:, None]
    considered = 4 * max_det
    while True:
        keep = nms(apart[:considered], scores[:considered].to(apart.dtype), iou)
        if len(keep) >= max_det or considered >= len(boxes):
            keep = keep[:max_det]
            return Detections(boxes[keep], scores[keep], classes[keep])
        considered *= 2
