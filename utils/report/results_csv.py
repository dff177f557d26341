"""results.csv: one row per epoch, written by rank 0; and opt.yaml and hyp.yaml, which a run directory begins with."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from tessera.utils.checkpoints.run_directory import write_flags, write_yaml
from tessera.utils.engine.state import Training
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write, open_plain, remove_leftovers
from tessera.utils.report.observers import EpochResult, Observer
from tessera.utils.text import duration, first_of, plural, shown

log = logging.getLogger(__name__)

ERRORS = "errors.jsonl"  # the last file of a run: if it exists, the best epoch was evaluated
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
        rows = read_rows(path, self.columns)[1] if path.exists() else []
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


class RunFiles(Observer):
    """opt.yaml, hyp.yaml and results.csv of a run. A resumed run keeps the rows of its finished epochs.

    Raises:
        UserError: on every rank, if the run directory is not writable or holds another results.csv.
    """

    every_rank = True  # the others fail with rank 0

    def begin(self, training: Training) -> None:
        context, progress = training.context, training.state.progress
        self._context, self._loss_names = context, training.criterion.names
        self._start_epoch = progress.epoch
        context.world.run_on_main(self._open)

    def epoch(self, epoch: EpochResult) -> None:
        row = results_row(epoch, self._loss_names)
        self._context.world.run_on_main(lambda: self._append(row))
        left = self._context.config.epochs - epoch.number - 1
        if epoch.number == self._start_epoch and left and epoch.images_per_s:
            log.info(f"{plural(left, 'more epoch')} at this pace: about {duration(left * epoch.seconds)}")

    def _append(self, row: Mapping[str, float]) -> None:
        with self._writing():
            self._table.append(row)

    def _open(self) -> None:
        context, folder = self._context, self._context.folder
        with self._writing():
            for place in (folder, folder / "weights"):
                remove_leftovers(place, of_any_host=True)  # this run may have been killed on another
            # First, as it refuses a foreign results.csv.
            self._table = ResultsTable(folder / "results.csv", self._loss_names, self._start_epoch)
            if lost := self._table.lost:
                log.warning(
                    f"{self._table.path}: the rows of {plural(len(lost), 'trained epoch')} are missing "
                    f"({first_of(list(map(str, lost)), 5)}), also from results.png and report.html."
                )
            (folder / ERRORS).unlink(missing_ok=True)  # of an earlier evaluation
            write_flags(folder / "opt.yaml", context.config)
            write_yaml(folder / "hyp.yaml", context.hyp.as_dict())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise errors of the file system as UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Run directory {self._context.folder}: not writable ({error.strerror or error}). Make room or fix its "
                f"permissions, and continue with --resume; or choose another with --project."
            ) from error


def results_row(epoch: EpochResult, loss_names: Sequence[str]) -> dict[str, float]:
    """Return the row of an epoch by column; NaN for what was not validated or not timed."""
    nan, metrics = float("nan"), epoch.metrics
    measured = (metrics.precision, metrics.recall, metrics.map50, metrics.map) if metrics else (nan,) * 4
    val_losses = metrics.losses if metrics and metrics.losses else (nan,) * len(loss_names)
    speed = (epoch.seconds, epoch.data_wait, epoch.images_per_s) if epoch.images_per_s else (nan,) * 3
    cells = (epoch.number, *epoch.losses, *measured, *val_losses, *epoch.rates, *speed)
    return dict(zip(result_columns(loss_names), cells, strict=True))


def read_rows(path: Path, columns: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], list[list[str]]]:
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
