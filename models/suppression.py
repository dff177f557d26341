"""Decoded predictions become detections, in pixels of the original image.

Legend: B images, A predictions of an image, C classes, K candidates (a box with one of its labels), D detections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import nms

from utils.boxes import clip_boxes, cxcywh_to_xyxy
from utils.types import Detections

_POSITION_BITS = 31
_LAST_POSITION = 2**_POSITION_BITS - 1
_SCORES_AT_ONCE = 2**24  # bounds the memory of their keys, 8 bytes each


@dataclass(frozen=True)
class Suppression:
    """Which predictions become detections.

    A score is the class probability, times objectness where a head has one. Equal scores keep the order of the
    predictions, so the result is determined. There is no time limit: a slow machine finds what a fast one finds.

    Attributes:
        conf: objectness and score must exceed it.
        iou: a box goes where it overlaps a better one by more than this.
        max_det: most detections an image.
        multi_label: every class above `conf` makes a candidate, not the best one alone; needs more than one class.
        agnostic: boxes of different classes compete too.
        has_objectness: whether rows have an objectness (`Head.has_objectness`).
        max_candidates: only so many, the best by score, enter an image's suppression.
    """

    conf: float
    iou: float
    max_det: int = 300
    multi_label: bool = True
    agnostic: bool = False
    has_objectness: bool = True
    max_candidates: int = 30_000

    def __post_init__(self) -> None:
        assert 0 <= self.conf <= 1 and 0 <= self.iou <= 1, (self.conf, self.iou)


def non_max_suppression(decoded: Tensor, rules: Suppression, widest: torch.dtype = torch.float64) -> list[Detections]:
    """Greedy non-maximum suppression, image by image; no image's result depends on the others'.

    Args:
        decoded: (B, A, 5 + C), rows centre x, centre y, width, height in pixels, objectness, class probabilities; or
            (B, A, 4 + C), the same without objectness.
        rules: which predictions become detections.
        widest: float type to move classes apart in: the accelerator's widest.

    Returns:
        B detections, on the device of `decoded`, descending by score.
    """
    with torch.no_grad():
        return [_suppress(_candidates(rows, rules), rules, widest) for rows in decoded]


def strongest_candidates(decoded: Tensor, rules: Suppression) -> Tensor:
    """The candidates of a batch in one tensor whose shape depends on no value, so that no host waits for the device.

    For devices with a queue of their own. Each image's rows, once they are on the host, go to `suppress_candidates`;
    both together find what `non_max_suppression` finds.

    Args:
        decoded, rules: as there.

    Returns:
        float32 (B, K, 6), K = min(max_candidates, A · C): rows x1, y1, x2, y2 in pixels, score, class, descending by
        score, equal scores in the order of the predictions. Rows after an image's last candidate have score 0.
    """
    images = max(_SCORES_AT_ONCE // max(decoded[0].numel(), 1), 1) if len(decoded) else 1
    with torch.no_grad():
        return torch.cat([_strongest(part, rules) for part in decoded.split(images)])


def suppress_candidates(rows: Tensor, rules: Suppression) -> Detections:
    """Suppression of one image's candidates, float32 (K, 6) from `strongest_candidates`, on the host."""
    rows = rows[: int((rows[:, 4] > 0).sum())]
    candidates = rows[:, :4].contiguous(), rows[:, 4].contiguous(), rows[:, 5].long()
    return _suppress(candidates, rules, torch.float64)


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


def _scores(rows: Tensor, rules: Suppression) -> Tensor:
    """(..., 5 + C) or (..., 4 + C) to the scores of all classes, float32 (..., C)."""
    return rows[..., 5:].float() * rows[..., 4:5].float() if rules.has_objectness else rows[..., 4:].float()


def _candidates(rows: Tensor, rules: Suppression) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (K, 4), scores (K,) and classes (K,) of one image, descending by score, K <= max_candidates."""
    # No class probability exceeds 1: what fails here cannot pass below, and it is nearly everything.
    bound = rows[:, 4] if rules.has_objectness else rows[:, 4:].amax(1)
    rows = rows[bound.float() > rules.conf].float()
    scores = _scores(rows, rules)
    if rules.multi_label and scores.shape[1] > 1:
        index, classes = (scores > rules.conf).nonzero(as_tuple=True)
        scores = scores[index, classes]
    else:
        scores, classes = scores.max(1)
        index = (scores > rules.conf).nonzero().squeeze(1)
        scores, classes = scores[index], classes[index]
    most = rules.max_candidates
    if len(scores) > most:
        # topk leaves open which of equal scores it takes; its smallest value decides nothing but how much is sorted.
        strong = (scores >= scores.topk(most, sorted=False).values.min()).nonzero().squeeze(1)
        index, scores, classes = index[strong], scores[strong], classes[strong]
    order = scores.argsort(descending=True, stable=True)[:most]
    return cxcywh_to_xyxy(rows[index[order], :4]), scores[order], classes[order]


def _strongest(decoded: Tensor, rules: Suppression) -> Tensor:
    """`strongest_candidates` of a few images."""
    scores, classes = _scores(decoded, rules), None
    labels = scores.shape[2] if rules.multi_label else 1
    if rules.multi_label:
        scores = scores.flatten(1)
    else:
        scores, classes = scores.max(2)
    # The bits of a positive float order as it does. With the position below them no two keys are equal, so that topk
    # has no choice among equal scores.
    position = torch.arange(scores.shape[1], device=scores.device)
    keys = scores.contiguous().view(torch.int32).long() << _POSITION_BITS | (_LAST_POSITION - position)
    keys = torch.where(scores > rules.conf, keys, 0).topk(min(rules.max_candidates, scores.shape[1])).values
    found = keys > 0
    chosen = torch.where(found, _LAST_POSITION - (keys & _LAST_POSITION), 0)
    index = chosen // labels
    boxes = cxcywh_to_xyxy(decoded[..., :4].float().gather(1, index[..., None].expand(-1, -1, 4)))
    label = chosen % labels if classes is None else classes.gather(1, index)
    score = torch.where(found, scores.gather(1, chosen), 0.0)
    return torch.cat((boxes, score[..., None], label[..., None].float()), 2)


def _suppress(candidates: tuple[Tensor, Tensor, Tensor], rules: Suppression, widest: torch.dtype) -> Detections:
    """Greedy suppression of candidates in descending order of score.

    Whether a box stays depends on better ones alone, so the survivors of the first k candidates are the first survivors
    of all. Where `max_det` of them are found among a few thousand, the other tens of thousands need not be compared.
    """
    # In float64 a class can be moved out of the others' way without rounding a single overlap.
    boxes, scores, classes = candidates
    apart = boxes.to(widest)
    if not rules.agnostic and len(boxes):
        apart = apart + (classes * (apart.max() - apart.min() + 1))[:, None]
    considered = 4 * rules.max_det
    while True:
        keep = nms(apart[:considered], scores[:considered].to(apart.dtype), rules.iou)
        if len(keep) >= rules.max_det or considered >= len(boxes):
            keep = keep[: rules.max_det]
            return Detections(boxes[keep], scores[keep], classes[keep])
        considered *= 2
