"""results.csv: one row per epoch, written by rank 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import pandas as pd

from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write, open_plain
from tessera.utils.text import shown

_LONGEST = 1 << 28  # bytes


def result_columns(loss_names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of results.csv for the loss names of a criterion, such as ("box", "obj", "cls")."""
    train, val = ([f"{part}/{name}_loss" for name in loss_names] for part in ("train", "val"))
    metrics = ("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95")
    rates_and_times = ("x/lr0", "x/lr1", "x/lr2", "time/epoch_s", "time/data_wait", "images_per_s")
    return ("epoch", *train, *metrics, *val, *rates_and_times)


class ResultsTable:
    """Writer of results.csv with the columns `result_columns(loss_names)`.

    A row is on disk when `append` returns. The file is written anew for each, so that one that was emptied, edited or
    deleted during the run loses nothing. Opening removes rows of epochs that will run again, and a last line cut short
    by a crash, so that no epoch is in the file twice.

    Attributes:
        lost: epochs before `start_epoch` that have no row, as the file was removed or cut.
    """

    def __init__(self, path: Path, loss_names: Sequence[str], start_epoch: int = 0) -> None:
        """Open `path`, or create it, for epochs from `start_epoch` on; raise UserError for another kind of table."""
        self.path, self.columns = path, result_columns(loss_names)
        rows = _read_rows(path, self.columns)[1] if path.exists() else []
        self.lost = sorted(set(range(start_epoch)) - {int(float(row[0])) for row in rows})
        self._rows: list[Sequence[str]] = [self.columns, *(row for row in rows if int(float(row[0])) < start_epoch)]
        self._write()

    def append(self, row: Mapping[str, float]) -> None:
        """Add one epoch; `row` has exactly the keys `columns`."""
        assert set(row) == set(self.columns), set(row) ^ set(self.columns)
        self._rows.append([str(int(row["epoch"])), *(f"{row[column]:.6g}" for column in self.columns[1:])])
        self._write()

    def _write(self) -> None:
        with atomic_write(self.path) as file:
            file.write("".join(f"{','.join(cells)}\n" for cells in self._rows).encode())


def read_results(path: Path) -> pd.DataFrame:
    """Read results.csv of any head: float columns, integer "epoch", without a last line that was cut short.

    Raises UserError if the file is not such a table.
    """
    columns, rows = _read_rows(path)
    table = pd.DataFrame(rows, columns=list(columns), dtype=object).astype(float)
    return table.astype({"epoch": int})


def _read_rows(path: Path, columns: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the columns and the cells of every complete row; `columns` = None accepts the losses of any head."""
    # What follows the last line end was cut short by a crash; so was a tail of zeros, which some file systems leave.
    try:
        with open_plain(path, _LONGEST) as file:
            whole = file.read().rstrip(b"\0").rpartition(b"\n")[0].rstrip(b"\r\n").decode("utf-8-sig", "replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Move it away; a new one will be made.") from error
    header, *rows = [line.removesuffix("\r").split(",") for line in whole.split("\n")] if whole else [[]]
    found = tuple(cell.strip() for cell in header)
    names = [match[1] for match in map(re.compile(r"train/(.+)_loss").fullmatch, found) if match]
    expected = columns or result_columns(names)
    if whole and found != expected:
        pairs = zip_longest(found, expected, fillvalue="nothing")
        at, own, wanted = next((at, *pair) for at, pair in enumerate(pairs, 1) if pair[0] != pair[1])
        raise UserError(
            f"{path}:1: found {shown(own)} as column {at}, expected {shown(wanted)}. Move the file away; a new one "
            "will be made."
        )
    for number, row in enumerate(rows, start=2):
        if not _is_row(row, len(expected)):
            raise UserError(
                f"{path}:{number}: found {shown(','.join(row))}, expected {len(expected)} numbers, the first an "
                "epoch. Remove the line."
            )
    return expected, rows


def _is_row(cells: Sequence[str], count: int) -> bool:
    """Return whether the cells are `count` numbers, the first an epoch."""
    try:
        epoch, *others = map(float, cells)
    except ValueError:
        return False
    return len(others) == count - 1 and epoch >= 0 and epoch.is_integer()
