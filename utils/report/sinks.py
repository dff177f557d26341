"""What is kept of detections as a validation finds them: label files, COCO results, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from utils.ranks.world import World
from utils.report.console import tolerate
from utils.report.pictures import draw_detections, draw_targets
from utils.report.results import CocoRows, coco_image_ids, output_stems, save_coco_results, save_txt
from utils.types import Batch, DatasetIndex, Detections

PICTURES = 3  # batches that are drawn


class Sink(Protocol):
    """Something that sees the detections of this rank's images, batch by batch."""

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Take a batch with its detections, on the host, in pixels of the batch and of the original images."""


class TxtSink:
    """`--save-txt`: a label file for each image of this rank, in `folder`."""

    def __init__(self, folder: Path, index: DatasetIndex, save_conf: bool) -> None:
        self._folder, self._save_conf = folder, save_conf
        self._stems = output_stems([index.path(i) for i in range(len(index))])

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Write the files of a batch."""
        sizes = batch.sizes_hw.tolist()
        for image, detections, (height, width) in zip(batch.indices.tolist(), in_original, sizes, strict=True):
            save_txt(self._folder, self._stems[image], detections, (height, width), self._save_conf)


class CocoSink:
    """`--save-json`: all detections, written by rank 0 at the end."""

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._found: dict[int, Detections] = {}

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Keep the detections of a batch."""
        self._found.update(zip(batch.indices.tolist(), in_original, strict=True))

    def write(self, target: Path, world: World) -> None:
        """Gather the ranks' detections and write them; all ranks call this."""
        rows = world.all_gather(CocoRows.collect(self._found))
        stems = output_stems([self._index.path(i) for i in range(len(self._index))])
        world.from_main(lambda: save_coco_results(target, rows, coco_image_ids(stems), self._index.names))


class PictureSink:
    """The first batches of this rank with their labels, and with what was found."""

    def __init__(self, folder: Path, index: DatasetIndex) -> None:
        self._folder, self._index = folder, index
        self._drawn = 0

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Draw a batch, as long as there are few."""
        if self._drawn == PICTURES:
            return
        captions = [self._index.path(i).name for i in batch.indices.tolist()]
        stem = self._folder / f"val_batch{self._drawn}"
        with tolerate(f"{stem.name} pictures"):
            draw_targets(batch, self._index.names, captions, stem.with_name(f"{stem.name}_labels.jpg"))
            draw_detections(batch, in_batch, self._index.names, captions, stem.with_name(f"{stem.name}_pred.jpg"))
        self._drawn += 1
