"""Gathers what the detections of a validation say of the labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.utils.evaluation.sinks import Sink
from tessera.utils.suspects.evidence import MOST, Evidence, Rows
from tessera.utils.suspects.judging import Labels, judge
from tessera.utils.types import Batch, DatasetIndex, Detections


class EvidenceSink(Sink):
    """Gathers the evidence of this rank's images.

    Args:
        index: the whole split.
        class_of: as of Settings; labels of classes that the model lacks are taken for ignored regions.
    """

    def __init__(self, index: DatasetIndex, class_of: Sequence[int]) -> None:
        self._index, self._known = index, np.isin(np.arange(len(index.names)), class_of)
        self._found, self._waiting = Evidence.joined(len(index.names), []), list[Rows]()
        self._count = 0

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Judge the labels of a batch."""
        for image, detections in zip(batch.indices.tolist(), found, strict=True):
            classes, boxes = self._index.labels(image)
            of_regions, regions = self._index.ignored(image)
            known = self._known[classes]
            of_regions = np.append(of_regions, np.full((~known).sum(), -1, np.int32))
            regions = np.concatenate((regions, boxes[~known]))
            size_hw = tuple(self._index.sizes_hw[image].tolist())
            labels = Labels(classes[known], boxes[known], (of_regions, regions), size_hw)
            rows = judge(image, detections, labels, self._found.counts)
            places = np.append(np.flatnonzero(known), -1).astype(np.int32)  # among all labels; -1 stays
            self._waiting.append(rows._replace(objects=places[rows.objects], others=places[rows.others]))
            self._count += len(rows.kinds)
        if self._count > MOST:
            self.evidence()

    def evidence(self) -> Evidence:
        """Of the images so far."""
        rows = Rows.joined([self._found.rows, *self._waiting]).most()
        self._found, self._count = Evidence(rows, self._found.counts), 0
        self._waiting.clear()
        return self._found
