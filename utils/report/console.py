"""Console output of a run: logging, the progress bar of an epoch, tables; and plain values for `--json`."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from tessera.utils.files import LOCK
from tessera.utils.image_size import ImageSize
from tessera.utils.text import escape_control, table_row
from tessera.utils.types import Metrics

if TYPE_CHECKING:  # `--check-data` does without torch
    from torch import Tensor

    from tessera.utils.engine.state import Training

# In a clone a command may be imported by its file's name too, as users of YOLOv5 do.
_PACKAGES = frozenset({"__main__", "tessera", "train", "val", "detect", "export", "compare", "convert"})
_WIDTH = 10
_BAR = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_REFRESH_S = 0.5  # reading the losses makes the host wait for the device, so not at every step
_PLAIN_REFRESH_S = 60.0  # where each refresh is a line of its own

T = TypeVar("T")


def setup_logging(rank: int, size: int) -> None:
    """Log to stderr: from level info on rank 0, errors with the rank on the others.

    Of other packages, errors and Python warnings are shown. A second call replaces the first.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Console)]:
        root.removeHandler(handler)
    prefix = f"rank {rank}: " if rank > 0 and size > 1 else ""
    handler = _Console(logging.INFO if rank == 0 else logging.ERROR, prefix)
    root.addHandler(handler)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    logging.captureWarnings(False)  # a second call alone would not replace a hook that somebody has changed since
    logging.captureWarnings(True)


def print_lines(*lines: str) -> None:
    """Print lines to stdout with terminal control characters escaped."""
    print("\n".join(map(escape_control, lines)), flush=True)


class _Console(logging.Handler):
    """Handler that writes between progress bars, with the level above info, and control characters escaped."""

    def __init__(self, level: int, prefix: str) -> None:
        super().__init__(level)
        self._prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name.partition(".")[0] in _PACKAGES or record.name == "py.warnings"
        return ours or record.levelno >= logging.ERROR

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record).rstrip(), file=sys.stderr)
        except Exception:  # logging's own rule: a failed log line ends no program
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        return f"{self._prefix}{level}{escape_control(super().format(record))}"


def plain_metrics(metrics: Metrics) -> dict[str, Any]:
    """Return metrics of all classes together and of each; docs/json.md explains the keys."""
    _, *rows = metrics.rows()
    columns = ("name", "images", "objects", "precision", "recall", "ap50", "ap")
    classes = metrics.class_ids.tolist()
    totals = ("map", "map50", "precision", "recall", "fitness", "confidence", "images", "objects")
    return {
        **{name: getattr(metrics, name) for name in totals},
        "speed_ms": dict(zip(("preprocess", "inference", "nms"), metrics.speed_ms, strict=True)),
        "classes": [
            {"class": c, **dict(zip(columns, row, strict=True)), "confidence": float(metrics.class_confidences[c])}
            for c, row in zip(classes, rows, strict=True)
        ],
    }


def plain_folder(run: Path | None) -> dict[str, Any]:
    """Return the run directory and its entries, directories with a slash; None without a run directory."""
    entries = sorted(path for path in run.iterdir() if path.name != LOCK) if run is not None else []
    return {"run": run and str(run), "files": [path.name + "/" * path.is_dir() for path in entries]}


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training; of a search, of its last training here. Values that do not apply are None."""

    metrics: Metrics | None = None  # of the best epoch
    run: Path | None = None  # run directory, or the directory of a search
    data: str | None = None  # `--data`
    epochs: int | None = None  # finished
    best_epoch: int | None = None  # from 0; None if none is better than the initial weights
    stopped_early: bool | None = None  # by `--patience`
    checked: dict[str, Any] | None = None  # result of `--check-data`
    exit_code: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        saved = sorted((self.run / "weights").glob("*.pt")) if self.run else []
        return {
            **{name: getattr(self, name) for name in ("data", "epochs", "best_epoch", "stopped_early", "checked")},
            "metrics": self.metrics and plain_metrics(self.metrics),
            "checkpoints": [str(path) for path in saved],
            **plain_folder(self.run),
        }


def table_header() -> str:
    return table_row("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


def validation_line(metrics: Metrics) -> str:
    """Return the row of all classes together, below `table_header`."""
    return table_row(*next(metrics.rows()))


class EpochBar:
    """Header and progress bar of an epoch; a context manager.

    On a terminal the bar moves. Elsewhere, as in a log file, a plain line is printed at the end of the epoch and once a
    minute before. Ranks other than 0 only measure. A run may be resumed in the middle of the epoch.
    """

    def __init__(self, epoch: int, batches: int, training: Training) -> None:
        world, start = training.context.world, training.state.progress.batch_in_epoch
        label = f"{epoch}/{training.context.config.epochs - 1}"
        losses = (f"{name}_loss" for name in training.criterion.names)
        self.columns = ("Epoch", "GPU_mem", *losses, "Instances", "Size", "Data_wait")
        self.label, self.batches = label, batches
        self.done = self._start = start
        self.wait_s = 0.0
        self._accelerator = world.accelerator
        self._stream = sys.stderr
        self._prints = world.is_main
        self._plain = not self._stream.isatty()
        if not self._plain:
            with suppress(OSError):  # no size known
                self._plain = os.get_terminal_size(self._stream.fileno()).columns == 0  # as in some containers
        self._started = self._shown = time.monotonic()
        self._ended: float | None = None
        self._latest: tuple[Tensor, int, ImageSize] | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> EpochBar:
        self._started = time.monotonic()
        self._shown = self._started if self._plain else -math.inf  # a bar shows its first batch immediately
        if self._prints:
            tqdm.write("".join(f"{name:>{_WIDTH}}" for name in self.columns), file=self._stream)
            if not self._plain:
                self._bar = tqdm(
                    total=self.batches, initial=self.done, bar_format=_BAR, file=self._stream, dynamic_ncols=True
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._accelerator.synchronize()  # what was queued belongs to the epoch; after an error it may never end
        self._ended = time.monotonic()
        if kind is None:
            self._show()
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Seconds since the epoch began, or its duration once it has ended."""
        return (self._ended or time.monotonic()) - self._started

    @property
    def data_wait(self) -> float:
        """Fraction of the time so far spent waiting for batches."""
        return min(self.wait_s / max(self.seconds, 1e-9), 1.0)

    @property
    def batches_per_s(self) -> float:
        """Batches per second over all ranks, since the epoch began or was resumed."""
        return (self.done - self._start) / max(self.seconds, 1e-9)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, adding the time waited for each to `wait_s`."""
        iterator = iter(batches)
        while True:
            before = time.monotonic()
            batch = next(iterator, None)
            self.wait_s += time.monotonic() - before
            if batch is None:
                return
            yield batch

    def update(self, batches: int, losses: Tensor, instances: int, size: ImageSize) -> None:
        """Count `batches` since the last call as done, and refresh the output when it is due.

        Losses are means of the epoch so far, read only when they are shown; `instances` are the objects in the last
        batch, and `size` is the image size.
        """
        self.done += batches
        self._latest = (losses, instances, size)
        if self._bar is not None:
            self._bar.update(batches)
        if time.monotonic() - self._shown >= (_PLAIN_REFRESH_S if self._plain else _REFRESH_S):
            self._show()

    def line(self) -> str:
        """Format the values of the latest batch, aligned with `columns`."""
        assert self._latest is not None, "no batch yet"
        losses, instances, size = self._latest
        cells = [self.label, f"{self._accelerator.reserved_memory() / 2**30:.3g}G"]
        cells += [f"{loss:.4g}" for loss in losses.tolist()]
        cells += [str(instances), str(size), f"{self.data_wait:.0%}"]
        return "".join(f"{cell:>{_WIDTH}}" for cell in cells)

    def _show(self) -> None:
        self._shown = time.monotonic()
        if not self._prints or self._latest is None:
            return
        if self._bar is not None:
            self._bar.set_description_str(self.line())
        else:
            rate = f"{self.done}/{self.batches} in {self.seconds:.1f} s, {self.batches_per_s:.3g} batches/s"
            tqdm.write(f"{self.line()}  {rate}", file=self._stream)
