"""Non-maximum suppression of decoded predictions, and conversion to pixels of the original image.

Legend: B images, A predictions of an image, C classes, K candidates (a box with one of its labels), D detections.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from tessera.utils.boxes import clip_boxes, cxcywh_to_xyxy
from tessera.utils.types import Detections

# The package would import sympy and the compiler of torch: seconds in every process, of which NMS needs nothing.
torch.ops.load_library(next(Path(find_spec("torchvision").origin).parent.glob("_C*.so")))  # type: ignore[union-attr,arg-type]
nms = torch.ops.torchvision.nms

_POSITION_BITS = 31
_LAST_POSITION = 2**_POSITION_BITS - 1
# Limits the memory for any number of classes: about 30 bytes per score.
_MOST_SCORES = 2**22


@dataclass(frozen=True)
class NmsSettings:
    """NMS settings.

    A score is the class probability, times objectness if the head has one. Equal scores keep the order of the
    predictions, so that the result is deterministic. There is no time limit: results do not depend on the machine's
    speed.
    """

    conf: float  # confidence threshold of objectness and score
    iou: float  # IoU threshold
    max_det: int = 300  # detections per image
    multi_label: bool = True  # each class above `conf` is a candidate, not only the best
    agnostic: bool = False  # boxes of different classes suppress each other too
    has_objectness: bool = True  # whether rows have an objectness (`Head.has_objectness`)
    max_candidates: int = 30_000  # per image, the best by score
    # Additional thresholds of each class, C numbers or (). At 1 a class is never detected.
    class_confs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.conf <= 1 and 0 <= self.iou <= 1, (self.conf, self.iou)


def non_max_suppression(
    decoded: Tensor, settings: NmsSettings, widest: torch.dtype = torch.float64
) -> list[Detections]:
    """Apply greedy NMS to each image, independently of the other images.

    Args:
        decoded: (B, A, 5 + C), rows centre x, centre y, width, height in pixels, objectness, class probabilities; or
            (B, A, 4 + C), without objectness.
        settings: see NmsSettings.
        widest: the accelerator's widest float type, in which boxes of different classes are separated.

    Returns:
        B detections, on the device of `decoded`, descending by score.
    """
    with torch.no_grad():
        return [_greedy_nms(_candidates(rows, settings), settings, widest) for rows in decoded]


def select_candidates(decoded: Tensor, settings: NmsSettings) -> Tensor:
    """Select the candidates of a batch as one tensor whose shape depends on no value, which avoids a synchronisation.

    On the host, the rows of each image then go to `nms_of_candidates`. The results equal those of
    `non_max_suppression`.

    Returns:
        float32 (B, K, 6), K = min(max_candidates, A · C): rows x1, y1, x2, y2 in pixels, score, class, descending by
        score, equal scores in the order of the predictions. Rows after an image's last candidate have score 0.
    """
    images = max(_MOST_SCORES // max(decoded[0].numel(), 1), 1) if len(decoded) else 1
    with torch.no_grad():
        return torch.cat([_select_candidates(part, settings) for part in decoded.split(images)])


def nms_of_candidates(rows: Tensor, settings: NmsSettings) -> Detections:
    """Apply NMS to one image's candidates, float32 (K, 6) from `select_candidates`, on the host."""
    rows = rows[: int((rows[:, 4] > 0).sum())]
    candidates = rows[:, :4].contiguous(), rows[:, 4].contiguous(), rows[:, 5].long()
    return _greedy_nms(candidates, settings, torch.float64)


def undo_letterbox(detections: Detections, placement: Tensor, size_hw: tuple[int, int]) -> Detections:
    """Map boxes to pixels of the original image and clip them; `placement` is scale_x, scale_y, left, top."""
    scale_x, scale_y, left, top = placement.tolist()
    boxes = detections.boxes_xyxy
    moved = (boxes - boxes.new_tensor((left, top, left, top))) / boxes.new_tensor((scale_x, scale_y, scale_x, scale_y))
    return Detections(clip_boxes(moved, size_hw), detections.scores, detections.classes)


def _scores(rows: Tensor, settings: NmsSettings) -> Tensor:
    """Return the scores of all classes, float32 (..., C), with 0 below the class's own threshold."""
    scores = rows[..., 5:].float() * rows[..., 4:5].float() if settings.has_objectness else rows[..., 4:].float()
    return scores * (scores > scores.new_tensor(settings.class_confs)) if settings.class_confs else scores


def _candidates(rows: Tensor, settings: NmsSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (K, 4), scores (K,) and classes (K,) of one image, descending by score, K <= max_candidates."""
    # No class probability exceeds 1, so that this removes nearly all rows early.
    bound = rows[:, 4] if settings.has_objectness else rows[:, 4:].amax(1)
    passing = (bound.float() > settings.conf).nonzero().squeeze(1)
    index, classes, scores = passing[:0], passing[:0], bound[:0].float()
    for part in passing.split(max(_MOST_SCORES // rows.shape[1], 1)):
        # Of equal scores the earlier wins, so that later candidates must exceed the last of a full list.
        full = len(scores) == settings.max_candidates
        found = _above_threshold(_scores(rows[part], settings), scores[-1] if full else settings.conf, settings)
        order, scores = _top(torch.cat((scores, found[2])), settings.max_candidates)
        index = torch.cat((index, part[found[0]]))[order]
        classes = torch.cat((classes, found[1]))[order]
    return cxcywh_to_xyxy(rows[index, :4].float()), scores, classes


def _above_threshold(scores: Tensor, above: Tensor | float, settings: NmsSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, classes and scores of the candidates among `scores` (n, C) that exceed `above`."""
    if settings.multi_label and scores.shape[1] > 1:
        index, classes = (scores > above).nonzero(as_tuple=True)
        return index, classes, scores[index, classes]
    scores, classes = scores.max(1)
    index = (scores > above).nonzero().squeeze(1)
    return index, classes[index], scores[index]


def _top(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the `most` highest scores, descending, equal ones in order; and these scores."""
    indices = torch.arange(len(scores), device=scores.device)
    if len(scores) > most:
        # topk's choice among equal scores is undefined; only its smallest value is used, to sort fewer scores.
        indices = (scores >= scores.topk(most, sorted=False).values.min()).nonzero().squeeze(1)
    indices = indices[scores[indices].argsort(descending=True, stable=True)[:most]]
    return indices, scores[indices]


def _select_candidates(decoded: Tensor, settings: NmsSettings) -> Tensor:
    """Apply `select_candidates` to a few images."""
    labels = decoded.shape[2] - (5 if settings.has_objectness else 4) if settings.multi_label else 1
    parts = decoded.split(max(_MOST_SCORES // max(len(decoded) * decoded.shape[2], 1), 1), 1)
    starts = itertools.accumulate((part.shape[1] * labels for part in parts), initial=0)
    chosen, classes = zip(
        *(_keys(part, start, settings) for part, start in zip(parts, starts, strict=False)), strict=True
    )
    keys = chosen[0] if len(chosen) == 1 else _largest(torch.cat(chosen, 1), settings)
    found = keys > 0
    position = torch.where(found, _LAST_POSITION - (keys & _LAST_POSITION), 0)
    index = position // labels
    boxes = cxcywh_to_xyxy(decoded[..., :4].gather(1, index[..., None].expand(-1, -1, 4)).float())
    label = position % labels if settings.multi_label else torch.cat(classes, 1).gather(1, index)
    score = (keys >> _POSITION_BITS).int().view(torch.float32)
    return torch.cat((boxes, score[..., None], label[..., None].float()), 2)


def _keys(rows: Tensor, start: int, settings: NmsSettings) -> tuple[Tensor, Tensor]:
    """Return the largest sort keys (B, K) of candidates in `rows` (B, n, 5 + C), and the best classes.

    The bits of a positive float are ordered as the float. The position of the candidate, counted from `start`, fills
    the low bits, so that keys are distinct and topk is deterministic. 0 is no candidate.
    """
    scores = _scores(rows, settings)
    classes = rows.new_zeros(0)
    if not settings.multi_label:
        scores, classes = scores.max(2)
    scores = scores.flatten(1).contiguous()
    keys = scores.view(torch.int32).long().bitwise_left_shift_(_POSITION_BITS)
    keys |= torch.arange(_LAST_POSITION - start, _LAST_POSITION - start - keys.shape[1], -1, device=keys.device)
    return _largest(keys.mul_(scores > settings.conf), settings), classes


def _largest(keys: Tensor, settings: NmsSettings) -> Tensor:
    """Return the `max_candidates` largest of each row, descending, or all."""
    return keys.topk(min(settings.max_candidates, keys.shape[1])).values


def _greedy_nms(candidates: tuple[Tensor, Tensor, Tensor], settings: NmsSettings, widest: torch.dtype) -> Detections:
    """Apply greedy NMS to candidates in descending order of score.

    Whether a box survives depends on better boxes alone. The survivors of the first k candidates are therefore the
    first survivors of all, so that the search stops once `max_det` are found.
    """
    # In float64, offsetting the boxes of each class rounds no overlap.
    boxes, scores, classes = candidates
    apart = boxes.to(widest)
    if not settings.agnostic and len(boxes):
        apart = apart + (classes * (apart.max() - apart.min() + 1))[:, None]
    considered = 4 * settings.max_det
    while True:
        keep = nms(apart[:considered], scores[:considered].to(apart.dtype), settings.iou)
        if len(keep) >= settings.max_det or considered >= len(boxes):
            keep = keep[: settings.max_det]
            return Detections(boxes[keep], scores[keep], classes[keep])
        considered *= 2
