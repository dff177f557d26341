"""Decoded predictions become detections, in pixels of the original image.

Legend: B images, A predictions of an image, C classes, K candidates (a box with one of its labels), D detections.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import nms

from tessera.utils.boxes import clip_boxes, cxcywh_to_xyxy
from tessera.utils.types import Detections

_POSITION_BITS = 31
_LAST_POSITION = 2**_POSITION_BITS - 1
# Bounds the memory, however many classes there are: about 30 bytes a score.
_SCORES_AT_ONCE = 2**22


@dataclass(frozen=True)
class Suppression:
    """Which predictions become detections.

    A score is the class probability, times objectness where a head has one. Equal scores keep the order of the
    predictions, so the result is determined. There is no time limit: a slow machine finds what a fast one finds.
    """

    conf: float  # objectness and score must exceed it
    iou: float  # a box goes where it overlaps a better one by more than this
    max_det: int = 300  # most detections an image
    multi_label: bool = True  # every class above `conf` makes a candidate, not the best one alone
    agnostic: bool = False  # boxes of different classes compete too
    has_objectness: bool = True  # whether rows have an objectness (`Head.has_objectness`)
    max_candidates: int = 30_000  # only so many, the best by score, enter an image's NMS
    # What scores of each class must exceed beside `conf`, C numbers; () where that is all. At 1 a class is left out.
    class_confs: tuple[float, ...] = ()

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

    Each image's rows, once they are on the host, go to `suppress_candidates`; both together find what
    `non_max_suppression` finds.

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
    """Boxes in pixels of the original image of `size_hw`, clipped to it; `placement` is scale_x, scale_y, left, top."""
    scale_x, scale_y, left, top = placement.tolist()
    boxes = detections.boxes_xyxy
    moved = (boxes - boxes.new_tensor((left, top, left, top))) / boxes.new_tensor((scale_x, scale_y, scale_x, scale_y))
    return Detections(clip_boxes(moved, size_hw), detections.scores, detections.classes)


def _scores(rows: Tensor, rules: Suppression) -> Tensor:
    """(..., 5 + C) or (..., 4 + C) to the scores of all classes, float32 (..., C); 0 below a class's own limit."""
    scores = rows[..., 5:].float() * rows[..., 4:5].float() if rules.has_objectness else rows[..., 4:].float()
    return scores * (scores > scores.new_tensor(rules.class_confs)) if rules.class_confs else scores


def _candidates(rows: Tensor, rules: Suppression) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (K, 4), scores (K,) and classes (K,) of one image, descending by score, K <= max_candidates."""
    # No class probability exceeds 1: what fails here cannot pass below, and it is nearly everything.
    bound = rows[:, 4] if rules.has_objectness else rows[:, 4:].amax(1)
    passing = (bound.float() > rules.conf).nonzero().squeeze(1)
    index, classes, scores = passing[:0], passing[:0], bound[:0].float()
    for part in passing.split(max(_SCORES_AT_ONCE // rows.shape[1], 1)):
        # Of equal scores the earlier goes first: what only equals the last of enough candidates comes too late.
        full = len(scores) == rules.max_candidates
        found = _passing(_scores(rows[part], rules), scores[-1] if full else rules.conf, rules)
        order, scores = _best(torch.cat((scores, found[2])), rules.max_candidates)
        index = torch.cat((index, part[found[0]]))[order]
        classes = torch.cat((classes, found[1]))[order]
    return cxcywh_to_xyxy(rows[index, :4].float()), scores, classes


def _passing(scores: Tensor, above: Tensor | float, rules: Suppression) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, classes and scores of the candidates among `scores` (n, C) that exceed `above`."""
    if rules.multi_label and scores.shape[1] > 1:
        index, classes = (scores > above).nonzero(as_tuple=True)
        return index, classes, scores[index, classes]
    scores, classes = scores.max(1)
    index = (scores > above).nonzero().squeeze(1)
    return index, classes[index], scores[index]


def _best(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Places of the `most` best scores, descending, equal ones in their order; and these scores."""
    places = torch.arange(len(scores), device=scores.device)
    if len(scores) > most:
        # topk leaves open which of equal scores it takes; its smallest value decides nothing but how much is sorted.
        places = (scores >= scores.topk(most, sorted=False).values.min()).nonzero().squeeze(1)
    places = places[scores[places].argsort(descending=True, stable=True)[:most]]
    return places, scores[places]


def _strongest(decoded: Tensor, rules: Suppression) -> Tensor:
    """`strongest_candidates` of a few images."""
    labels = decoded.shape[2] - (5 if rules.has_objectness else 4) if rules.multi_label else 1
    parts = decoded.split(max(_SCORES_AT_ONCE // max(len(decoded) * decoded.shape[2], 1), 1), 1)
    starts = itertools.accumulate((part.shape[1] * labels for part in parts), initial=0)
    chosen, classes = zip(*(_keys(part, start, rules) for part, start in zip(parts, starts, strict=False)), strict=True)
    keys = chosen[0] if len(chosen) == 1 else _largest(torch.cat(chosen, 1), rules)
    found = keys > 0
    position = torch.where(found, _LAST_POSITION - (keys & _LAST_POSITION), 0)
    index = position // labels
    boxes = cxcywh_to_xyxy(decoded[..., :4].gather(1, index[..., None].expand(-1, -1, 4)).float())
    label = position % labels if rules.multi_label else torch.cat(classes, 1).gather(1, index)
    score = (keys >> _POSITION_BITS).int().view(torch.float32)
    return torch.cat((boxes, score[..., None], label[..., None].float()), 2)


def _keys(rows: Tensor, start: int, rules: Suppression) -> tuple[Tensor, Tensor]:
    """The largest keys (B, K) of candidates in `rows` (B, n, 5 + C), the first at position `start`; the best classes.

    The bits of a positive float order as it does. With the position below them no two keys are equal, so that topk has
    no choice among equal scores. 0 is no candidate.
    """
    scores = _scores(rows, rules)
    classes = rows.new_zeros(0)
    if not rules.multi_label:
        scores, classes = scores.max(2)
    scores = scores.flatten(1).contiguous()
    keys = scores.view(torch.int32).long().bitwise_left_shift_(_POSITION_BITS)
    keys |= torch.arange(_LAST_POSITION - start, _LAST_POSITION - start - keys.shape[1], -1, device=keys.device)
    return _largest(keys.mul_(scores > rules.conf), rules), classes


def _largest(keys: Tensor, rules: Suppression) -> Tensor:
    """The largest of each row, descending, `max_candidates` or all."""
    return keys.topk(min(rules.max_candidates, keys.shape[1])).values


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
