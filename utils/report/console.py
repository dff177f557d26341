"""Logging and console output of a run, and plain values for `--json`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera.utils.ranks.run_lock import LOCK
from tessera.utils.text import escape_control, table_row
from tessera.utils.types import Metrics

# In a clone a command may be imported by its file's name too, as users of YOLOv5 do.
_PACKAGES = frozenset({"__main__", "tessera", "train", "val", "detect", "export", "compare", "convert"})


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


def table_header() -> str:
    return table_row("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


def validation_line(metrics: Metrics) -> str:
    """Return the row of all classes together, below `table_header`."""
    return table_row(*next(metrics.rows()))
