"""What a detector finds where it is used: at its own threshold, object by object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import FALSE_KINDS, Kind, Regions, match_image, to_host
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex, Detections


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
    """Match an image's detections with its objects at IoU 0.5."""
    matches = match_image(detections, target_boxes, target_classes, regions)
    order = np.argsort(-to_host(detections.scores), kind="stable")
    found = np.zeros(len(target_classes), np.bool_)
    found[matches.objects[matches.kinds == Kind.CORRECT]] = True
    return Finds(
        to_host(detections.boxes_xyxy)[order].astype(np.float32, copy=False),
        matches.scores,
        matches.classes,
        np.isin(matches.kinds, FALSE_KINDS),
        found,
    )
