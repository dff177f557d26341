"""Gathers what the detections of a validation say of the labels."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.utils.evaluation.sinks import Sink
from tessera.utils.suspects.evidence import MOST, Evidence, Rows
from tessera.utils.suspects.judging import Labels, judge
from tessera.utils.types import Batch, DatasetIndex, Detections


class EvidenceSink(Sink):
    """Gathers the evidence of this rank's images.

    Args:
        index: the whole split.
    """

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._found, self._waiting = Evidence.joined(len(index.names), []), list[Rows]()
        self._count = 0

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Judge the labels of a batch."""
        for image, detections in zip(batch.indices.tolist(), in_original, strict=True):
            classes, boxes = self._index.labels(image)
            labels = Labels(classes, boxes, self._index.ignored(image), tuple(self._index.sizes_hw[image].tolist()))
            rows = judge(image, detections, labels, self._found.counts)
            self._waiting.append(rows)
            self._count += len(rows.kinds)
        if self._count > MOST:
            self.evidence()

    def evidence(self) -> Evidence:
        """Of the images so far."""
        rows = Rows.joined([self._found.rows, *self._waiting]).most()
        self._found, self._count = Evidence(rows, self._found.counts), 0
        self._waiting.clear()
        return self._found
