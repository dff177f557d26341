"""COCO category ids, and `--save-json`: detections in COCO's results format (Lin et al. 2014).

Images and classes that come from a COCO file keep its ids.
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
    """Return the category id of each class: COCO's own where `names` are COCO's 80 in order, else the class index."""
    return COCO_IDS if tuple(names) == COCO_NAMES else tuple(range(len(names)))


def results_ids(index: DatasetIndex) -> CocoIds:
    """Return the ids of the COCO file that the images come from, else those of file names and classes."""
    stems = output_stems([index.path(i) for i in range(len(index))])
    return index.coco_ids() or CocoIds(tuple(coco_image_ids(stems)), coco_category_ids(index.names))


def coco_image_ids(stems: Sequence[str]) -> list[int | str]:
    """Return the image_id of each image: a numeric stem as a number, unless two would be equal, as "1" and "01"."""
    ids = [int(stem) if stem.isascii() and stem.isdecimal() else stem for stem in stems]
    return ids if len(set(ids)) == len(ids) else list(stems)


def coco_results(found: Matches, ids: CocoIds) -> Iterator[dict[str, object]]:
    """Yield results in COCO's format by ascending image; bbox is (left, top, width, height).

    Boxes have five decimals. Scores keep all digits of float32, so that different ones do not become ties.
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
    """Write `target` atomically, one result per line."""
    with atomic_write(target) as file:
        separator = b"[\n"
        for row in coco_results(found, ids):
            file.write(separator + strict_json(row).encode())
            separator = b",\n"
        file.write(b"\n]\n" if separator == b",\n" else b"[]\n")
