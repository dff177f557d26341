"""COCO's numbering of classes, and `--save-json`: detections in the format of COCO's results (Lin et al. 2014).

Images and classes that come from a COCO file have its ids. COCO numbers its 80 classes in a row, but their category ids
from 1 to 90 with ten left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.annotations.coco_ids import COCO_NAMES
from tessera.utils.evaluation.label_files import output_stems
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.files import atomic_write
from tessera.utils.ranks.world import World
from tessera.utils.text import strict_json
from tessera.utils.types import Batch, CocoIds, DatasetIndex, Detections

_UNUSED_IDS = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
COCO_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED_IDS)


def coco_category_ids(names: Sequence[str]) -> tuple[int, ...]:
    """Category id of each class: COCO's own where `names` are COCO's 80 in order, else the class index."""
    return COCO_IDS if tuple(names) == COCO_NAMES else tuple(range(len(names)))


class CocoSink(Sink):
    """All detections, written by rank 0 at the end."""

    def __init__(self, index: DatasetIndex) -> None:
        self._index = index
        self._found: dict[int, Detections] = {}

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Keep the detections of a batch."""
        self._found.update(zip(batch.indices.tolist(), in_original, strict=True))

    def write(self, target: Path, world: World) -> None:
        """Gather the ranks' detections and write them; all ranks call this."""
        rows = world.gather(CocoRows.collect(self._found))
        world.from_main(lambda: save_coco_results(target, rows, results_ids(self._index)))


def results_ids(index: DatasetIndex) -> CocoIds:
    """The ids of the COCO file that the images come from; else their files' names, and COCO's ids or the classes."""
    stems = output_stems([index.path(i) for i in range(len(index))])
    return index.coco_ids() or CocoIds(tuple(coco_image_ids(stems)), coco_category_ids(index.names))


class CocoRows(NamedTuple):
    """Detections of many images as flat arrays, to be gathered from the ranks.

    Attributes:
        images: int64 (D,), index of each detection's image.
        boxes_xyxy: float32 (D, 4), pixels of the original image.
        scores: float32 (D,).
        classes: int64 (D,).
    """

    images: NDArray[np.int64]
    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]

    @classmethod
    def collect(cls, found: Mapping[int, Detections]) -> CocoRows:
        """Flatten detections by image index."""
        return cls(
            np.repeat(np.array(list(found), np.int64), [len(d) for d in found.values()]),
            np.concatenate([np.zeros((0, 4), np.float32), *(d.boxes_xyxy.cpu().numpy() for d in found.values())]),
            np.concatenate([np.zeros(0, np.float32), *(d.scores.cpu().numpy() for d in found.values())]),
            np.concatenate([np.zeros(0, np.int64), *(d.classes.cpu().numpy() for d in found.values())]),
        )


def coco_image_ids(stems: Sequence[str]) -> list[int | str]:
    """COCO's image_id of each image: a stem that is a number as that number, unless two meet so, as "1" and "01" do."""
    ids = [int(stem) if stem.isascii() and stem.isdecimal() else stem for stem in stems]
    return ids if len(set(ids)) == len(ids) else list(stems)


def coco_results(rows: CocoRows, ids: CocoIds) -> Iterator[dict[str, object]]:
    """Results in COCO's format, by ascending image: image_id, category_id, bbox (left, top, width, height), score.

    Pixels to five decimals, scores with all digits that float32 has: those that differ must not become ties.

    Args:
        rows: of all ranks, or of one.
        ids: of images and classes.
    """
    order = np.argsort(rows.images, kind="stable")
    boxes = rows.boxes_xyxy[order].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (
        rows.images[order].tolist(),
        rows.classes[order].tolist(),
        boxes.round(5).tolist(),
        rows.scores[order].astype(str).astype(np.float64).tolist(),
    )
    for image, class_id, box, score in zip(*columns, strict=True):
        yield {"image_id": ids.images[image], "category_id": ids.categories[class_id], "bbox": box, "score": score}


def save_coco_results(target: Path, gathered: Sequence[CocoRows], ids: CocoIds) -> None:
    """Write `target` whole or not at all, one result a line, from all ranks' rows; for rank 0."""
    rows = CocoRows(*(np.concatenate(column) for column in zip(*gathered, strict=True)))
    with atomic_write(target) as file:
        separator = b"[\n"
        for row in coco_results(rows, ids):
            file.write(separator + strict_json(row).encode())
            separator = b",\n"
        file.write(b"\n]\n" if separator == b",\n" else b"[]\n")
