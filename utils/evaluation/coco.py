"""COCO's numbering of classes, and `--save-json`: detections in the format of COCO's results (Lin et al. 2014).

Images and classes that come from a COCO file have its ids. COCO numbers its 80 classes in a row, but their category ids
from 1 to 90 with ten left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tessera.data.source.annotations.coco_ids import COCO_NAMES
from tessera.utils.evaluation.label_files import output_stems
from tessera.utils.evaluation.matches import Matches
from tessera.utils.files import atomic_write
from tessera.utils.text import strict_json
from tessera.utils.types import CocoIds, DatasetIndex

_UNUSED_IDS = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
COCO_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED_IDS)


def coco_category_ids(names: Sequence[str]) -> tuple[int, ...]:
    """Category id of each class: COCO's own where `names` are COCO's 80 in order, else the class index."""
    return COCO_IDS if tuple(names) == COCO_NAMES else tuple(range(len(names)))


def results_ids(index: DatasetIndex) -> CocoIds:
    """The ids of the COCO file that the images come from; else their files' names, and COCO's ids or the classes."""
    stems = output_stems([index.path(i) for i in range(len(index))])
    return index.coco_ids() or CocoIds(tuple(coco_image_ids(stems)), coco_category_ids(index.names))


def coco_image_ids(stems: Sequence[str]) -> list[int | str]:
    """COCO's image_id of each image: a stem that is a number as that number, unless two meet so, as "1" and "01" do."""
    ids = [int(stem) if stem.isascii() and stem.isdecimal() else stem for stem in stems]
    return ids if len(set(ids)) == len(ids) else list(stems)


def coco_results(found: Matches, ids: CocoIds) -> Iterator[dict[str, object]]:
    """Results in COCO's format, by ascending image: image_id, category_id, bbox (left, top, width, height), score.

    Pixels to five decimals, scores with all digits that float32 has: those that differ must not become ties.

    Args:
        found: with boxes.
        ids: of images and classes.
    """
    boxes = found.boxes_xyxy.astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (
        np.repeat(found.images, found.detection_counts).tolist(),
        found.classes.tolist(),
        boxes.round(5).tolist(),
        found.scores.astype(str).astype(np.float64).tolist(),
    )
    for image, class_id, box, score in zip(*columns, strict=True):
        yield {"image_id": ids.images[image], "category_id": ids.categories[class_id], "bbox": box, "score": score}


def save_coco_results(target: Path, found: Matches, ids: CocoIds) -> None:
    """Write `target` whole or not at all, one result a line."""
    with atomic_write(target) as file:
        separator = b"[\n"
        for row in coco_results(found, ids):
            file.write(separator + strict_json(row).encode())
            separator = b",\n"
        file.write(b"\n]\n" if separator == b",\n" else b"[]\n")
