"""Result files: `--save-txt`, YOLO label files; `--save-json`, COCO's results format; unique names of files.

Images and classes that come from a COCO file keep its ids (Lin et al. 2014).
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from itertools import count
from pathlib import Path, PurePath

import numpy as np
import torch

from tessera.data.labels.coco import COCO_NAMES
from tessera.utils.bit_depth import IMAGE_SUFFIXES
from tessera.utils.boxes import xyxy_to_cxcywh
from tessera.utils.evaluation.evaluate import DetectionCollector
from tessera.utils.evaluation.matching import Matches
from tessera.utils.files import LONGEST_NAME, atomic_write, short_name, suffix_of, write_whole
from tessera.utils.text import strict_json
from tessera.utils.types import Batch, CocoIds, DatasetIndex, Detections

LABELS, CROPS = "labels", "crops"  # result folders beside images
MOST_BYTES = 190  # of a name without suffix
_MOST_BYTES_OF_FOLDERS = 2000
_FILES = IMAGE_SUFFIXES | {".mp4", ".txt", ".csv", ".jsonl", ".part"}  # suffixes of result files
_UNUSED_IDS = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
COCO_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED_IDS)


def label_file_writer(folder: Path, index: DatasetIndex, save_conf: bool) -> DetectionCollector:
    """Return a function that writes a label file for each image of a batch."""
    stems = output_stems([index.path(i) for i in range(len(index))])

    def write(batch: Batch, found: Sequence[Detections]) -> None:
        sizes = batch.sizes_hw.tolist()
        for image, detections, (height, width) in zip(batch.indices.tolist(), found, sizes, strict=True):
            save_txt(folder, stems[image], detections, (height, width), save_conf)

    return write


def output_stems(paths: Sequence[Path]) -> list[str]:
    """Return a unique result name for each image of a dataset, the same on every rank.

    The name is the file's stem where all differ, else the path below the common folder ("cam1/0001"), else with the
    suffix ("0001.jpg" beside "0001.png") and a number. Names that a file system may not distinguish count as equal.
    """
    stems = [path.stem for path in paths]
    if _all_differ(stems):
        return stems
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - removes "..", which Path.absolute keeps
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])  # noqa: PTH120
    relative = [Path(path).relative_to(root) for path in absolute]
    shortened = [output_path(path.with_suffix("")).as_posix() for path in relative]
    if _all_differ(shortened):
        return shortened
    taken: set[str] = set()
    return [unique_name(output_path(path).as_posix(), taken) for path in relative]


def _all_differ(names: Sequence[str]) -> bool:
    return len({name_key(name) for name in names}) == len(names)


def unique_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is `taken`, and add it to `taken`."""
    free = next(
        text for number in count(1) if name_key(text := f"{name}-{number}" if number > 1 else name) not in taken
    )
    taken.add(name_key(free))
    return free


def output_path(name: PurePath) -> PurePath:
    """Return a relative path for results: short enough, and no folder of it named like a result file."""
    *folders, last = ("_" if part == ".." else part for part in name.parts)
    for i, folder in enumerate(folders):
        if suffix_of(folder) in _FILES or (i == 0 and name_key(folder) in (LABELS, CROPS)):
            folders[i] = short_name(folder, LONGEST_NAME - 1) + "_"
    if sum(len(os.fsencode(folder)) + 1 for folder in folders) > _MOST_BYTES_OF_FOLDERS:
        folders = [short_name("_".join(folders), MOST_BYTES)]
    return PurePath(*folders, short_name(last, MOST_BYTES))


def name_key(name: PurePath | str) -> str:
    """Return a key that is equal for names that a file system may not distinguish, by case or Unicode form."""
    text = str(name)
    return (
        text.lower() if text.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())
    )


def save_txt(
    folder: Path,
    stem: str,
    detections: Detections,
    size_hw: tuple[int, int],
    save_conf: bool,
    ids: Sequence[int] | None = None,
) -> Path:
    """Write the detections of one image to `folder`/`stem`.txt, replacing the file; empty without detections.

    Rows are `class x y w h [conf] [id]`: centre and size as fractions of the image. `ids` are those of tracked objects;
    -1 = none.
    """
    height, width = size_hw
    boxes = xyxy_to_cxcywh(detections.boxes_xyxy.cpu().double()) / torch.tensor([width, height, width, height])
    rows = zip(detections.classes.tolist(), boxes.tolist(), detections.scores.tolist(), strict=True)
    lines = []
    for number, (class_id, box, score) in enumerate(rows):
        numbers = [*box, score] if save_conf else box
        end = "" if ids is None else f" {ids[number]}"
        lines.append(f"{class_id} {' '.join(f'{x:.6g}' for x in numbers)}{end}\n")
    target = folder / f"{stem}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, "".join(lines).encode())
    return target


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


def save_coco_results(target: Path, found: Matches, ids: CocoIds) -> None:
    """Write results in COCO's format by ascending image, one per line, atomically; bbox is (left, top, width, height).

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
    with atomic_write(target) as file:
        separator = b"[\n"
        for image, class_id, box, score in zip(*columns, strict=True):
            row = {"image_id": ids.images[image], "category_id": ids.categories[class_id], "bbox": box, "score": score}
            file.write(separator + strict_json(row).encode())
            separator = b",\n"
        file.write(b"\n]\n" if separator == b",\n" else b"[]\n")
