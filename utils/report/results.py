"""results.csv: one row an epoch, whole at every moment. Only rank 0 writes it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from utils.errors import UserError
from utils.files import atomic_write

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
