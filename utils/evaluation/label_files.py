"""`--save-txt`: detections as label files, one an image."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.boxes import xyxy_to_cxcywh
from utils.evaluation.sinks import Sink
from utils.types import Batch, DatasetIndex, Detections


class LabelFileSink(Sink):
    """A label file for each image of this rank, in `folder`."""

    def __init__(self, folder: Path, index: DatasetIndex, save_conf: bool) -> None:
        self._folder, self._save_conf = folder, save_conf
        self._stems = output_stems([index.path(i) for i in range(len(index))])

    def add(self, batch: Batch, in_batch: Sequence[Detections], in_original: Sequence[Detections]) -> None:
        """Write the files of a batch."""
        sizes = batch.sizes_hw.tolist()
        for image, detections, (height, width) in zip(batch.indices.tolist(), in_original, sizes, strict=True):
            save_txt(self._folder, self._stems[image], detections, (height, width), self._save_conf)


def output_stems(paths: Sequence[Path]) -> list[str]:
    """A name for the results of each image of a dataset, such that no two images share one.

    The file's stem where all stems differ; else, for all images, the path below their common folder, as in
    "cam1/0001"; with its suffix where even that is not enough ("0001.jpg" beside "0001.png"). Upper and lower case
    count as equal, since file systems may take them so. A pure function of the whole list, the same on every rank.

    Args:
        paths: all images, in the order of the dataset.
    """
    stems = [path.stem for path in paths]
    if _all_differ(stems):
        return stems
    absolute = [os.path.abspath(path) for path in paths]  # noqa: PTH100 - removes "..", which Path.absolute keeps
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])  # noqa: PTH120
    relative = [Path(path).relative_to(root) for path in absolute]
    shortened = [path.with_suffix("").as_posix() for path in relative]
    return shortened if _all_differ(shortened) else [path.as_posix() for path in relative]


def _all_differ(names: Sequence[str]) -> bool:
    return len({name.casefold() for name in names}) == len(names)


def save_txt(
    folder: Path,
    stem: str,
    detections: Detections,
    size_hw: tuple[int, int],
    save_conf: bool,
    ids: Sequence[int] | None = None,
) -> Path:
    """Write one image's detections to `folder`/`stem`.txt, in place of what was there; an empty file where none.

    Rows `class x y w h [conf] [id]`: centre and size as shares of the image.

    Args:
        folder: made where missing.
        stem: from `output_stems`, so that images of one name in two folders keep apart.
        detections: boxes in pixels of the original image.
        size_hw: height and width of the original image.
        save_conf: add the score.
        ids: of tracked objects, one a detection; -1 = none.

    Returns:
        The file.
    """
    height, width = size_hw
    shares = xyxy_to_cxcywh(detections.boxes_xyxy.cpu().double()) / torch.tensor([width, height, width, height])
    rows = zip(detections.classes.tolist(), shares.tolist(), detections.scores.tolist(), strict=True)
    lines = []
    for number, (class_id, share, score) in enumerate(rows):
        figures = [*share, score] if save_conf else share
        end = "" if ids is None else f" {ids[number]}"
        lines.append(f"{class_id} {' '.join(f'{x:.6g}' for x in figures)}{end}\n")
    target = folder / f"{stem}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines), encoding="utf-8")
    return target
