"""Detections of one image against its objects, by COCO's rules.

Within each class, detections choose in the order of descending score; each takes the unmatched object of highest IoU
that reaches the threshold. A detection that takes none is neutral where as much of its own area lies in an ignored
region of its class or of any class, however many do. This is `COCOeval.evaluateImg` of pycocotools with area "all" and
regions as crowds, ties included: of equal scores the earlier detection goes first, of equal IoUs the later object is
taken.

Legend: D detections, G objects and R ignored regions of the image, T = 10 IoU thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import box_iou

from tessera.utils.types import Detections

Regions = tuple[NDArray[np.int32], NDArray[np.float32]]

IOU_THRESHOLDS: NDArray[np.float64] = np.linspace(0.5, 0.95, 10)


@dataclass(frozen=True)
class ImageMatches:
    """What one image adds to the metric.

    Attributes:
        correct: bool (D, T), whether the detection has an object of its own at each of `IOU_THRESHOLDS`.
        scores: float32 (D,), descending.
        classes: int32 (D,).
        target_classes: int32 (G,).
        in_regions: uint8 (D,), at how many of the thresholds, from the first on, a region covers the detection; it is
            neutral at those where it is not correct.
    """

    correct: NDArray[np.bool_]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    target_classes: NDArray[np.int32]
    in_regions: NDArray[np.uint8]


def match_image(
    detections: Detections,
    target_boxes: NDArray[np.float32],
    target_classes: NDArray[np.int32],
    regions: Regions | None = None,
) -> ImageMatches:
    """Match one image's detections with its objects.

    Args:
        detections: on any device, in any order; one copy to the host beforehand is cheaper than one an image.
        target_boxes: (G, 4) xyxy pixels in the frame of the detections.
        target_classes: (G,) integers.
        regions: classes (R,), -1 for any, and boxes (R, 4) of the ignored regions.
    """
    scores = to_host(detections.scores).astype(np.float32, copy=False)
    order = np.argsort(-scores, kind="stable")
    classes = to_host(detections.classes).astype(np.int32)[order]
    targets = target_classes.astype(np.int32)
    correct = np.zeros((len(order), len(IOU_THRESHOLDS)), np.bool_)
    if len(order) and len(targets):
        iou = pairwise_iou(detections.boxes_xyxy, target_boxes)[order]
        iou[classes[:, None] != targets] = 0
        # Most detections reach no object at all, and take no part in what follows.
        rows = np.flatnonzero((iou >= IOU_THRESHOLDS[0]).any(1))
        correct[rows] = _assign(iou[rows])
    in_regions = np.zeros(len(order), np.uint8)
    if regions is not None and len(regions[0]):
        covered = region_cover(detections, regions)[order]
        in_regions = np.searchsorted(IOU_THRESHOLDS, covered, side="right").astype(np.uint8)
    return ImageMatches(correct, scores[order], classes, targets, in_regions)


def region_cover(detections: Detections, regions: Regions) -> NDArray[np.float64]:
    """How much of each detection's area lies in the region of its class, or of any, that covers most of it: (D,)."""
    classes, boxes_xyxy = regions
    if len(classes) == 0:
        return np.zeros(len(detections))
    found = to_host(detections.boxes_xyxy).astype(np.float64).reshape(-1, 4)
    low, high = np.maximum(found[:, None, :2], boxes_xyxy[:, :2]), np.minimum(found[:, None, 2:], boxes_xyxy[:, 2:])
    common = (high - low).clip(0).prod(2)
    common[(classes >= 0) & (classes != to_host(detections.classes)[:, None])] = 0
    area = (found[:, 2:] - found[:, :2]).prod(1)
    return np.divide(common.max(1), area, out=np.zeros(len(found)), where=area > 0)


def pairwise_iou(a_xyxy: NDArray[np.float32] | Tensor, b_xyxy: NDArray[np.float32] | Tensor) -> NDArray[np.float64]:
    """IoU of every pair, (N, 4) and (M, 4) to (N, M), in double precision, as in pycocotools."""
    # Copied by NumPy: labels are mapped read-only, which torch would warn of.
    a, b = (torch.from_numpy(to_host(boxes).astype(np.float64).reshape(-1, 4)) for boxes in (a_xyxy, b_xyxy))
    return box_iou(a, b).nan_to_num_(0).numpy()  # 0 / 0: two boxes without an area


def to_host(array: NDArray[Any] | Tensor) -> NDArray[Any]:
    """The array in the host's memory, without a copy where it is there already."""
    return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)


def _assign(iou: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Greedy assignment at every threshold: IoU (D, G) by descending score, 0 between classes, to correct (D, T)."""
    candidate = iou >= IOU_THRESHOLDS[0]
    has_choice = candidate.sum(1) > 1
    contested = candidate[has_choice].any(0)  # objects that some detection with a choice may take

    # A detection without a choice takes its only object, at the thresholds that it is the first to reach.
    best_so_far = np.maximum.accumulate(iou, 0)
    best_before = np.concatenate((np.zeros((1, iou.shape[1])), best_so_far[:-1]))
    rows, best = np.arange(len(iou)), iou.argmax(1)
    reached, taken = iou[rows, best, None], best_before[rows, best, None]
    correct = (reached >= IOU_THRESHOLDS) & (taken < IOU_THRESHOLDS)

    # Not so around contested objects, where a choice depends on all choices before it: one row after the other.
    # Columns are reversed: argmax returns the first of equal values, and the rule takes the last object.
    disputed = np.where(candidate, iou, 0.0)[:, contested][:, ::-1]
    if disputed.shape[1]:
        thresholds = np.arange(len(IOU_THRESHOLDS))
        free = np.ones((len(IOU_THRESHOLDS), disputed.shape[1]), np.bool_)
        for row in np.flatnonzero(disputed.any(1)):
            offers = np.where(free & (disputed[row] >= IOU_THRESHOLDS[:, None]), disputed[row], 0.0)
            choice = offers.argmax(1)
            correct[row] = offers[thresholds, choice] > 0
            free[thresholds[correct[row]], choice[correct[row]]] = False
    return correct
