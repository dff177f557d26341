"""What a run says in words, rows and files: tables, the console's lines, results.csv, label files, COCO results.

Writing is for rank 0 alone, but for `save_txt`, whose files belong to one image each.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from utils.boxes import xyxy_to_cxcywh
from utils.errors import UserError
from utils.evaluation.coco import coco_category_ids
from utils.files import atomic_write
from utils.types import Detections, Metrics

TABLE_COLUMNS = ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
RESULT_COLUMNS = (
    "epoch",
    "train/box_loss",
    "train/obj_loss",
    "train/cls_loss",
    "metrics/precision",
    "metrics/recall",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
    "val/box_loss",
    "val/obj_loss",
    "val/cls_loss",
    "x/lr0",
    "x/lr1",
    "x/lr2",
    "time/epoch_s",
    "time/data_wait",
    "images_per_s",
)
_NAME_WIDTH, _FIGURE_WIDTH = 22, 11


def class_table(metrics: Metrics, names: Sequence[str]) -> pd.DataFrame:
    """Columns `TABLE_COLUMNS`; the row "all", then one for each class that has objects.

    Args:
        metrics: of a validation.
        names: class names by index.
    """
    rows: list[tuple[object, ...]] = [_overall(metrics)]
    for class_id, figures in zip(metrics.class_ids, metrics.per_class, strict=True):
        counts = metrics.images_per_class[class_id], metrics.objects_per_class[class_id]
        rows.append((names[class_id], *(int(n) for n in counts), *figures.tolist()))
    return pd.DataFrame(rows, columns=list(TABLE_COLUMNS))


def _overall(metrics: Metrics) -> tuple[str, int, int, float, float, float, float]:
    return "all", metrics.images, metrics.objects, metrics.precision, metrics.recall, metrics.map50, metrics.map


def table_header() -> str:
    """`Class Images Instances P R mAP50 mAP50-95`, aligned with `table_lines`."""
    return _aligned(TABLE_COLUMNS)


def table_lines(table: pd.DataFrame) -> list[str]:
    """Rows of `class_table` for the console, figures to three digits; a name that is too long is cut."""
    return [_aligned(_cells(row)) for row in table.itertuples(index=False, name=None)]


def validation_line(metrics: Metrics) -> str:
    """The row "all", to stand below `table_header`."""
    return _aligned(_cells(_overall(metrics)))


def _cells(row: tuple[Any, ...]) -> list[str]:
    name, images, instances, *figures = row
    return [name, str(images), str(instances), *(f"{figure:.3g}" for figure in figures)]


def _aligned(cells: Sequence[str]) -> str:
    name, *figures = cells
    if len(name) > _NAME_WIDTH:
        name = name[: _NAME_WIDTH - 3] + "..."
    return f"{name:>{_NAME_WIDTH}}" + "".join(f"{figure:>{_FIGURE_WIDTH}}" for figure in figures)


def interval_line(metrics: Metrics, low: float, high: float) -> str:
    """mAP50-95 with its 95 % interval from `bootstrap_interval`."""
    return f"mAP50-95 {metrics.map:.3f}, 95 % interval {low:.3f} to {high:.3f} (bootstrap over {metrics.images} images)"


def speed_line(speed_ms: tuple[float, float, float], shape: Sequence[int]) -> str:
    """Milliseconds an image: preparation, inference, NMS; `shape` is the batch's (B, 3, H, W)."""
    preparation, inference, nms = speed_ms
    return (
        f"Speed: {preparation:.1f} ms preparation, {inference:.1f} ms inference, {nms:.1f} ms NMS per image "
        f"at shape ({', '.join(str(n) for n in shape)})"
    )


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


def save_txt(folder: Path, stem: str, detections: Detections, size_hw: tuple[int, int], save_conf: bool) -> Path:
    """Write one image's detections to `folder`/`stem`.txt, in place of what was there; an empty file where none.

    Rows `class x y w h [conf]`: centre and size as shares of the image.

    Args:
        folder: made where missing.
        stem: from `output_stems`, so that images of one name in two folders keep apart.
        detections: boxes in pixels of the original image.
        size_hw: height and width of the original image.
        save_conf: add the score.

    Returns:
        The file.
    """
    height, width = size_hw
    shares = xyxy_to_cxcywh(detections.boxes_xyxy.cpu().double()) / torch.tensor([width, height, width, height])
    rows = zip(detections.classes.tolist(), shares.tolist(), detections.scores.tolist(), strict=True)
    lines = []
    for class_id, share, score in rows:
        figures = [*share, score] if save_conf else share
        lines.append(f"{class_id} {' '.join(f'{x:.6g}' for x in figures)}\n")
    target = folder / f"{stem}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines), encoding="utf-8")
    return target


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


def coco_results(rows: CocoRows, image_ids: Sequence[int | str], names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Results in COCO's format, by ascending image: image_id, category_id, bbox (left, top, width, height), score.

    Pixels to three decimals, scores to five.

    Args:
        rows: of all ranks, or of one.
        image_ids: by image index.
        names: class names; if they are COCO's 80, COCO's own 91 category ids are used, else the class index.
    """
    category_ids = coco_category_ids(names)
    order = np.argsort(rows.images, kind="stable")
    boxes = rows.boxes_xyxy[order].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (
        rows.images[order].tolist(),
        rows.classes[order].tolist(),
        boxes.round(3).tolist(),
        rows.scores[order].astype(np.float64).round(5).tolist(),
    )
    for image, class_id, box, score in zip(*columns, strict=True):
        yield {"image_id": image_ids[image], "category_id": category_ids[class_id], "bbox": box, "score": score}


def save_coco_results(
    target: Path, gathered: Sequence[CocoRows], image_ids: Sequence[int | str], names: Sequence[str]
) -> None:
    """Write `target` whole or not at all, one result a line, from all ranks' rows; for rank 0."""
    rows = CocoRows(*(np.concatenate(column) for column in zip(*gathered, strict=True)))
    with atomic_write(target) as file:
        separator = b"[\n"
        for row in coco_results(rows, image_ids, names):
            file.write(separator + json.dumps(row).encode())
            separator = b",\n"
        file.write(b"\n]\n" if separator == b",\n" else b"[]\n")


class ResultsTable:
    """results.csv: one row an epoch, columns `RESULT_COLUMNS`.

    Each row is on the disk when `append` returns. On opening, rows of epochs that are about to be run again go, and so
    does a last line that a crash cut short, so that no epoch is ever in the file twice.
    """

    def __init__(self, path: Path, start_epoch: int = 0) -> None:
        """Open `path` for appending, or make it.

        Args:
            path: the file.
            start_epoch: first epoch that will be appended; rows from it on are removed.

        Raises:
            UserError: the file is not such a table.
        """
        self.path = path
        rows = _read_rows(path) if path.exists() else []
        with atomic_write(path) as file:
            file.write(_csv_line(RESULT_COLUMNS))
            for row in rows:
                if int(float(row[0])) < start_epoch:
                    file.write(_csv_line(row))

    def append(self, row: Mapping[str, float]) -> None:
        """Add one epoch; `row` has exactly the keys `RESULT_COLUMNS`."""
        assert set(row) == set(RESULT_COLUMNS), set(row) ^ set(RESULT_COLUMNS)
        cells = [str(int(row["epoch"])), *(f"{row[column]:.6g}" for column in RESULT_COLUMNS[1:])]
        with self.path.open("ab") as file:
            file.write(_csv_line(cells))
            file.flush()
            os.fsync(file.fileno())


def read_results(path: Path) -> pd.DataFrame:
    """results.csv as float columns `RESULT_COLUMNS`, "epoch" as integers, without a last line that was cut short.

    Raises:
        UserError: the file is not such a table.
    """
    rows = _read_rows(path)
    table = pd.DataFrame(rows, columns=list(RESULT_COLUMNS), dtype=object).astype(float)
    return table.astype({"epoch": int})


def _csv_line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _read_rows(path: Path) -> list[list[str]]:
    """Cells of every whole row below the header."""
    # What follows the last line end was cut short by a crash; so was a tail of zeros, which some file systems leave.
    whole = path.read_bytes().rstrip(b"\0").rpartition(b"\n")[0].decode("utf-8-sig", "replace")
    header, *rows = list(csv.reader(io.StringIO(whole))) or [list(RESULT_COLUMNS)]
    if tuple(cell.strip() for cell in header) != RESULT_COLUMNS:
        raise UserError(
            f"{path}:1: found the columns '{', '.join(header)}', expected '{', '.join(RESULT_COLUMNS)}'. "
            "Move the file away; a new one will be made."
        )
    for number, row in enumerate(rows, start=2):
        if len(row) != len(RESULT_COLUMNS) or not all(_is_number(cell) for cell in row) or not _is_epoch(row[0]):
            raise UserError(
                f"{path}:{number}: found '{','.join(row)}', expected {len(RESULT_COLUMNS)} numbers, the first an "
                "epoch. Remove the line."
            )
    return rows


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_epoch(cell: str) -> bool:
    value = float(cell)
    return value >= 0 and value.is_integer()
