"""Matching of one image's detections with its objects by COCO's rules, and their kinds of error by TIDE's.

Within each class, detections choose in descending order of score. Each takes the unmatched object of highest IoU that
reaches the threshold. A detection without an object is neutral if a fraction of its area as large as the threshold lies
in an ignored region of its class, or of any class, or if the image does not label its class, as in LVIS. This is
`COCOeval.evaluateImg` of pycocotools with area "all" and regions as crowds, including ties: of equal scores the earlier
detection goes first, of equal IoUs the later object wins.

Errors are classified by the rules of TIDE (Bolya et al. 2020).

Legend: D detections, G objects and R ignored regions of an image, T = 10 IoU thresholds; N images, M objects of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.utils.types import Detections

Regions = tuple[NDArray[np.int32], NDArray[np.float32]]

CONFIDENCES: NDArray[np.float64] = np.linspace(0.0, 1.0, 1000)  # the axis of the curves
IOU_THRESHOLDS: NDArray[np.float64] = np.linspace(0.5, 0.95, 10)
BACKGROUND_IOU = 0.1  # a detection with no higher IoU is on background


class Kind(IntEnum):
    """Kind of a detection or an object, at IoU 0.5."""

    CORRECT = 0  # a true positive; an object with one
    WRONG_CLASS = 1  # on an object of another class
    LOCALIZATION = 2  # near an object of its class, with an IoU from 0.1 to 0.5
    BOTH = 3  # near an object of another class, with an IoU above 0.1 and below 0.5
    DUPLICATE = 4  # on an object that has a true positive
    BACKGROUND = 5  # on no object
    MISSED = 6  # an object without a detection that is correct, or would be with the right class or location
    IGNORED = 7  # a detection in an ignored region, or of a class that the image does not label: it does not count


FALSE_KINDS = (Kind.WRONG_CLASS, Kind.LOCALIZATION, Kind.BOTH, Kind.DUPLICATE, Kind.BACKGROUND)  # of detections


class Matches(NamedTuple):
    """Objects and detections of images in dataset order; the detections of an image by descending score.

    Attributes:
        images: int64 (N,), dataset indices, ascending.
        target_counts, detection_counts: int64 (N,), objects and detections of each.
        target_classes: int32 (M,).
        scores: float32 (D,), classes: int32 (D,).
        correct: uint16 (D,), bit t: a true positive at threshold t.
        ignored: uint16 (D,), bit t: neutral, as none at threshold t, in an ignored region or of an unlabelled class.
        kinds: uint8 (D,), `Kind`.
        objects: signed (D,), the object concerned, as its row among those of the image: its own at IoU 0.5, the one it
            duplicates, or the nearest one, of its class if its location is wrong, of another if its class is wrong; -1
            without one.
        boxes_xyxy: float32 (D, 4), pixels of the original image; (D, 0) without boxes.
    """

    images: NDArray[np.int64]
    target_counts: NDArray[np.int64]
    detection_counts: NDArray[np.int64]
    target_classes: NDArray[np.int32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    correct: NDArray[np.uint16]
    ignored: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    objects: NDArray[np.signedinteger]
    boxes_xyxy: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: Sequence[Matches]) -> Matches:
        """Join the matches of all parts, in any order. Each image must be in one part only."""
        parts = [part for part in parts if len(part.images)] or [_NOTHING]
        every = cls._make(np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(every.images, kind="stable")
        images = every.images[order]
        assert np.all(np.diff(images) > 0), "an image was evaluated twice: shards of a validation must not overlap"
        targets = np.argsort(np.repeat(every.images, every.target_counts), kind="stable")
        rows = np.argsort(np.repeat(every.images, every.detection_counts), kind="stable")
        counts = every.target_counts[order], every.detection_counts[order]
        return cls._make((images, *counts, every.target_classes[targets], *(column[rows] for column in every[4:])))

    def object_matches(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each object (M,) the row of its true positive and of its near miss, -1 for none.

        The near miss is the most confident detection about the object whose class or location is wrong.
        """
        starts = np.cumsum(self.target_counts) - self.target_counts
        about = np.flatnonzero(self.kinds <= Kind.LOCALIZATION)
        rows = np.repeat(starts, self.detection_counts)[about] + self.objects[about]
        is_correct = self.kinds[about] == Kind.CORRECT
        correct, near_misses = np.full(len(self.target_classes), -1), np.full(len(self.target_classes), -1)
        correct[rows[is_correct]] = about[is_correct]
        # An image's detections are sorted: the first one about an object is the most confident.
        missed, first = np.unique(rows[~is_correct], return_index=True)
        near_misses[missed] = about[~is_correct][first]
        return correct, near_misses


_DTYPES = ("i8", "i8", "i8", "i4", "f4", "i4", "u2", "u2", "u1", "i1")
_NOTHING = Matches._make([*(np.zeros(0, dtype) for dtype in _DTYPES), np.zeros((0, 4), np.float32)])


def match_image(
    detections: Detections,
    target_boxes: NDArray[np.float32],
    target_classes: NDArray[np.int32],
    regions: Regions | None = None,
    unlabelled: NDArray[np.bool_] | None = None,
    *,
    image: int = 0,
) -> Matches:
    """Match the detections of one image, on any device and in any order, with its objects in the same frame.

    `regions` are classes (R,), -1 for any, and boxes (R, 4) of the ignored regions; `unlabelled` are the classes that
    the image does not label, (C,), None = none; `image` is its dataset index.
    """
    scores = to_host(detections.scores).astype(np.float32, copy=False)
    order = np.argsort(-scores, kind="stable")
    classes = to_host(detections.classes).astype(np.int32)[order]
    targets = target_classes.astype(np.int32)
    boxes_xyxy = to_host(detections.boxes_xyxy).astype(np.float32, copy=False).reshape(-1, 4)[order]
    correct, own = np.zeros((len(order), len(IOU_THRESHOLDS)), np.bool_), np.full(len(order), -1)
    in_regions = np.zeros(
        (len(order), 1), np.int64
    )  # the number of thresholds, from the first, of which a region covers
    if regions is not None and len(regions[0]):
        covered = region_cover(detections, regions)[order]
        in_regions[:, 0] = np.searchsorted(IOU_THRESHOLDS, covered, side="right")
    if unlabelled is not None:
        in_regions[unlabelled[classes]] = len(IOU_THRESHOLDS)
    is_ignored = in_regions[:, 0] > 0
    if len(order) and len(targets):
        iou = pairwise_iou(boxes_xyxy, target_boxes)
        same = np.where(classes[:, None] == targets, iou, 0.0)
        # Most detections reach no object at all, and take no part in what follows.
        rows = np.flatnonzero((same >= IOU_THRESHOLDS[0]).any(1))
        correct[rows], own[rows] = _assign(same[rows])
        kinds, objects = _judge(iou, same, own, is_ignored)
    else:
        kinds, objects = np.where(is_ignored, Kind.IGNORED, Kind.BACKGROUND).astype(np.uint8), own.astype(np.int8)
    return Matches(
        images=np.array([image], np.int64),
        target_counts=np.array([len(targets)], np.int64),
        detection_counts=np.array([len(order)], np.int64),
        target_classes=targets,
        scores=scores[order],
        classes=classes,
        correct=_as_bits(correct),
        ignored=_as_bits(~correct & (np.arange(len(IOU_THRESHOLDS)) < in_regions)),
        kinds=kinds,
        objects=objects,
        boxes_xyxy=boxes_xyxy,
    )


def _judge(
    iou: NDArray[np.float64], same: NDArray[np.float64], own: NDArray[np.int64], ignored: NDArray[np.bool_]
) -> tuple[NDArray[np.uint8], NDArray[np.signedinteger]]:
    """Return `Matches.kinds` and `.objects` from IoUs (D, G), IoUs within classes, and own objects (D,)."""
    other = np.where(same > 0, 0.0, iou)
    best_same, best_other = same.max(1), other.max(1)
    enough = IOU_THRESHOLDS[0]
    kinds = np.select(
        [
            own >= 0,
            ignored,
            (best_same >= BACKGROUND_IOU) & (best_same <= enough),
            best_other >= enough,
            best_same > enough,
            np.maximum(best_same, best_other) <= BACKGROUND_IOU,
        ],
        [Kind.CORRECT, Kind.IGNORED, Kind.LOCALIZATION, Kind.WRONG_CLASS, Kind.DUPLICATE, Kind.BACKGROUND],
        Kind.BOTH,
    ).astype(np.uint8)
    of_other = np.isin(kinds, (Kind.WRONG_CLASS, Kind.BOTH))
    of_none = np.isin(kinds, (Kind.BACKGROUND, Kind.IGNORED))
    objects = np.select([own >= 0, of_none, of_other], [own, np.full_like(own, -1), other.argmax(1)], same.argmax(1))
    return kinds, objects.astype(np.min_scalar_type(-iou.shape[1]))


def region_cover(detections: Detections, regions: Regions) -> NDArray[np.float64]:
    """Return the largest fraction of each detection's area that an ignored region covers, (D,)."""
    classes, boxes_xyxy = regions
    found = to_host(detections.boxes_xyxy).astype(np.float64).reshape(-1, 4)
    low, high = np.maximum(found[:, None, :2], boxes_xyxy[:, :2]), np.minimum(found[:, None, 2:], boxes_xyxy[:, 2:])
    common = (high - low).clip(0).prod(2)
    common[(classes >= 0) & (classes != to_host(detections.classes)[:, None])] = 0
    area = (found[:, 2:] - found[:, :2]).prod(1)
    return np.divide(common.max(1), area, out=np.zeros(len(found)), where=area > 0)


def pairwise_iou(a_xyxy: NDArray[np.float32] | Tensor, b_xyxy: NDArray[np.float32] | Tensor) -> NDArray[np.float64]:
    """Compute the IoU of every pair, (N, 4) and (M, 4) to (N, M), in double precision, as pycocotools."""
    a, b = (to_host(boxes).astype(np.float64).reshape(-1, 4) for boxes in (a_xyxy, b_xyxy))
    low, high = np.maximum(a[:, None, :2], b[:, :2]), np.minimum(a[:, None, 2:], b[:, 2:])
    common = (high - low).clip(0).prod(2)
    area_a, area_b = ((boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b))
    union = area_a[:, None] + area_b - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def to_host(array: NDArray[Any] | Tensor) -> NDArray[Any]:
    """Return a NumPy array, without a copy if it is on the host already."""
    return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)


def _assign(iou: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Assign objects greedily at every threshold, from the IoUs (D, G) by descending score, 0 between classes.

    Return whether each is a true positive (D, T), and the object of each at the first threshold (D,), -1 for none.
    """
    candidate = iou >= IOU_THRESHOLDS[0]
    has_choice = candidate.sum(1) > 1
    contested = candidate[has_choice].any(0)  # objects that some detection with a choice may take

    # A detection without a choice takes its only object, at the thresholds that it is the first to reach.
    best_so_far = np.maximum.accumulate(iou, 0)
    best_before = np.concatenate((np.zeros((1, iou.shape[1])), best_so_far[:-1]))
    rows, best = np.arange(len(iou)), iou.argmax(1)
    reached, taken = iou[rows, best, None], best_before[rows, best, None]
    correct = (reached >= IOU_THRESHOLDS) & (taken < IOU_THRESHOLDS)
    own = np.where(correct[:, 0], best, -1)

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
            own[row] = np.flatnonzero(contested)[::-1][choice[0]] if correct[row, 0] else -1
    return correct, own


def _as_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Pack (D, T) into uint16 (D,), bit t from column t."""
    return flags @ (1 << np.arange(flags.shape[1], dtype=np.uint16))
