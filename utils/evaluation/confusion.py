"""Which class is taken for which, and for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import Regions, pairwise_iou, region_cover, to_host
from tessera.utils.runtime.model import DEFAULT_CONF, DEFAULT_IOU
from tessera.utils.types import Detections

_COUNTED_AFTER = 1000  # images, whose pairs wait as they are


class PairCounts(NamedTuple):
    """How often pairs of classes occurred.

    Attributes:
        cells: int64 (K,), ascending, predicted · (nc + 1) + true.
        counts: int64 (K,).
    """

    cells: NDArray[np.int64]
    counts: NDArray[np.int64]


class ConfusionMatrix:
    """Counts of (predicted class, true class) over images.

    Detections at least 0.25 sure are paired with objects of any class by descending IoU above 0.45; each
    detection and each object has one partner at most. Where two detections overlap an object equally (two labels of one
    box), the more confident one takes it. A detection without a partner of which more than 0.45 lies in an ignored
    region of its class, or of any, is not counted.

    Only pairs that occur take memory: of thousands of classes a matrix would be gigabytes.
    """

    def __init__(self, nc: int) -> None:
        self.nc = nc
        self._cells: list[NDArray[np.int64]] = []  # of each pair that occurred: predicted · (nc + 1) + true
        self._counted = PairCounts(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def joined(cls, nc: int, shares: Iterable[PairCounts]) -> ConfusionMatrix:
        """Of the images of all `shares`."""
        confusion = cls(nc)
        confusion._count(shares)
        return confusion

    @property
    def matrix(self) -> NDArray[np.int64]:
        """Counts (nc + 1, nc + 1). Rows are predicted, columns true classes; the last of each is background.

        So column nc counts false positives, row nc missed objects, and column c < nc adds up to the objects of c.
        """
        return self.grouped(np.arange(self.nc + 1))

    def grouped(self, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts (G, G) as in `matrix`, of G groups in place of classes.

        Args:
            group_of: (nc + 1,) group of each class and of background, 0 to G - 1.
        """
        cells, counts = self.pairs()
        groups = int(group_of.max()) + 1
        predicted, true = np.divmod(cells, self.nc + 1)
        summed = np.bincount(group_of[predicted] * groups + group_of[true], counts, groups**2)
        return summed.astype(np.int64).reshape(groups, groups)

    def confusions(self) -> NDArray[np.int64]:
        """How often each class was taken for another one, or another one for it: (nc,)."""
        cells, counts = self.pairs()
        predicted, true = np.divmod(cells, self.nc + 1)
        confused = (predicted != true) & (predicted < self.nc) & (true < self.nc)
        both = np.concatenate((predicted[confused], true[confused]))
        return np.bincount(both, np.tile(counts[confused], 2), self.nc).astype(np.int64)

    def pairs(self) -> PairCounts:
        """The cells of `matrix` that are not 0."""
        cells = np.concatenate([np.zeros(0, np.int64), *self._cells])
        self._cells.clear()
        self._count([PairCounts(cells, np.ones_like(cells))])
        return self._counted

    def _count(self, more: Iterable[PairCounts]) -> None:
        cells, counts = (np.concatenate(column) for column in zip(self._counted, *more, strict=True))
        unique, where = np.unique(cells, return_inverse=True)
        self._counted = PairCounts(unique, np.bincount(where, counts, len(unique)).astype(np.int64))

    def add(
        self,
        detections: Detections,
        target_boxes: NDArray[np.float32],
        target_classes: NDArray[np.int32],
        regions: Regions | None = None,
    ) -> None:
        """Count one image, with or without objects, with or without detections.

        Args:
            detections: of the image.
            target_boxes: (G, 4) xyxy pixels in the frame of the detections.
            target_classes: (G,) integers below nc.
            regions: as in `match_image`.
        """
        scores = to_host(detections.scores)
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] >= DEFAULT_CONF]
        predicted = to_host(detections.classes)[order].astype(np.int64)
        true = target_classes.astype(np.int64)
        iou = pairwise_iou(to_host(detections.boxes_xyxy)[order], target_boxes)
        rows, columns = np.nonzero(iou > DEFAULT_IOU)
        pairs = []
        unmatched_rows, unmatched_columns = np.ones(len(predicted), np.bool_), np.ones(len(true), np.bool_)
        for pair in np.argsort(-iou[rows, columns], kind="stable"):
            row, column = rows[pair], columns[pair]
            if unmatched_rows[row] and unmatched_columns[column]:
                unmatched_rows[row] = unmatched_columns[column] = False
                pairs.append((predicted[row], true[column]))
        if regions is not None:
            unmatched_rows &= region_cover(detections, regions)[order] <= DEFAULT_IOU
        matched = np.array(pairs, np.int64).reshape(-1, 2) @ (self.nc + 1, 1)
        false_positives = predicted[unmatched_rows] * (self.nc + 1) + self.nc
        missed = self.nc * (self.nc + 1) + true[unmatched_columns]
        self._cells.append(np.concatenate((matched, false_positives, missed)))
        if len(self._cells) == _COUNTED_AFTER:
            self.pairs()
