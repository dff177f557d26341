"""What a detector finds where it is used: at its own threshold, object by object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import IOU_THRESHOLDS, Regions, pairwise_iou, region_cover, to_host
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex, Detections

IOU = float(IOU_THRESHOLDS[0])


class Finds(NamedTuple):
    """Detections of an image that reach the threshold.

    Attributes:
        boxes_xyxy: float32 (D, 4), pixels of the original image.
        scores: float32 (D,), descending.
        classes: int32 (D,).
        wrong: bool (D,), without an object of their own, outside ignored regions.
        found: bool (G,), the objects that a detection has.
    """

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    wrong: NDArray[np.bool_]
    found: NDArray[np.bool_]


class FindSink(Sink):
    """Keeps what is found on this rank's images.

    Args:
        index: the whole split.
        threshold: smallest confidence.
    """

    def __init__(self, index: DatasetIndex, threshold: float) -> None:
        self._index, self._threshold = index, threshold
        self._finds: dict[int, Finds] = {}

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Keep those of a batch."""
        for image, detections in zip(batch.indices.tolist(), in_original, strict=True):
            classes, boxes_xyxy = self._index.labels(image)
            sure = detections.scores >= self._threshold
            kept = Detections(detections.boxes_xyxy[sure], detections.scores[sure], detections.classes[sure])
            self._finds[image] = finds_of(kept, boxes_xyxy, classes, self._index.ignored(image))

    def gathered(self, world: World) -> dict[int, Finds]:
        """Of all images, ascending, on rank 0; all ranks call it."""
        everywhere = {image: finds for share in world.gather(self._finds) for image, finds in share.items()}
        return dict(sorted(everywhere.items()))


def finds_of(
    detections: Detections, target_boxes: NDArray[np.float32], target_classes: NDArray[np.int32], regions: Regions
) -> Finds:
    """Match an image's detections with its objects at IoU 0.5, by the rules of `match_image`."""
    scores = to_host(detections.scores).astype(np.float32, copy=False)
    order = np.argsort(-scores, kind="stable")
    boxes, classes = to_host(detections.boxes_xyxy)[order], to_host(detections.classes)[order].astype(np.int32)
    iou = pairwise_iou(boxes, target_boxes)
    iou[(classes[:, None] != target_classes) | (iou < IOU)] = 0
    right, found = np.zeros(len(order), np.bool_), np.zeros(len(target_classes), np.bool_)
    for row in np.flatnonzero(iou.any(1)):
        offers = np.where(found, 0.0, iou[row])
        best = len(offers) - 1 - int(offers[::-1].argmax())  # of equal ones the last
        if offers[best] > 0:
            right[row] = found[best] = True
    wrong = ~right & (region_cover(detections, regions)[order] < IOU)
    return Finds(boxes.astype(np.float32, copy=False), scores[order], classes, wrong, found)
