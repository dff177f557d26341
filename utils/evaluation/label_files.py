"""`--save-txt`: detections as YOLO label files, and unique file names for results."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from itertools import count
from pathlib import Path, PurePath

import torch

from tessera.utils.bit_depth import IMAGE_SUFFIXES
from tessera.utils.boxes import xyxy_to_cxcywh
from tessera.utils.evaluation.predictors import DetectionCollector
from tessera.utils.files import LONGEST_NAME, short_name, suffix_of, write_whole
from tessera.utils.types import Batch, DatasetIndex, Detections

LABELS, CROPS = "labels", "crops"  # result folders beside images
MOST_BYTES = 190  # of a name without suffix
_MOST_BYTES_OF_FOLDERS = 2000
_FILES = IMAGE_SUFFIXES | {".mp4", ".txt", ".csv", ".jsonl", ".part"}  # suffixes of result files


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
