"""Which class is taken for which, and for nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from utils.evaluation.matching import Crowds, crowd_cover, pairwise_iou, to_host
from utils.types import Detections

CONFIDENCE = 0.25  # of a detection that counts
IOU = 0.45  # above which a detection and an object are paired


class ConfusionMatrix:
    """Counts of (predicted class, true class) over images.

    Detections at least 0.25 sure are paired with objects of any class by descending IoU above 0.45; each
    detection and each object has one partner at most. Where two detections overlap an object equally (two labels of one
    box), the more confident one takes it. A detection without a partner of which more than 0.45 lies in a crowd region
    of its class is not counted.

    Attributes:
        matrix: int64 (nc + 1, nc + 1). Rows are predicted, columns true classes; the last of each is background. So
            column nc counts false positives, row nc missed objects, and column c < nc adds up to the objects of c.
    """

    def __init__(self, nc: int) -> None:
        self.nc = nc
        self.matrix: NDArray[np.int64] = np.zeros((nc + 1, nc + 1), np.int64)

    def add(
        self,
        detections: Detections,
        target_boxes: NDArray[np.float32] | Tensor,
        target_classes: NDArray[np.int32] | Tensor,
        crowds: Crowds | None = None,
    ) -> None:
        """Count one image, with or without objects, with or without detections.

        Args:
            detections: of the image.
            target_boxes: (G, 4) xyxy pixels in the frame of the detections.
            target_classes: (G,) integers below nc.
            crowds: classes (R,) and boxes (R, 4) of the crowd regions.
        """
        scores = to_host(detections.scores)
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] >= CONFIDENCE]
        predicted = to_host(detections.classes)[order].astype(np.int64)
        true = to_host(target_classes).astype(np.int64).reshape(-1)
        iou = pairwise_iou(to_host(detections.boxes_xyxy)[order], target_boxes)
        rows, columns = np.nonzero(iou > IOU)
        unmatched_rows, unmatched_columns = np.ones(len(predicted), np.bool_), np.ones(len(true), np.bool_)
        for pair in np.argsort(-iou[rows, columns], kind="stable"):
            row, column = rows[pair], columns[pair]
            if unmatched_rows[row] and unmatched_columns[column]:
                unmatched_rows[row] = unmatched_columns[column] = False
                self.matrix[predicted[row], true[column]] += 1
        if crowds is not None:
            unmatched_rows &= crowd_cover(detections, crowds)[order] <= IOU
        self.matrix[:-1, -1] += np.bincount(predicted[unmatched_rows], minlength=self.nc)
        self.matrix[-1, :-1] += np.bincount(true[unmatched_columns], minlength=self.nc)
