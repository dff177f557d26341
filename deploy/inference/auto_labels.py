"""Reader of `auto_labels.jsonl`: label files that a model wrote, with their content hash and lowest score.

One line describes the run and its classes. One line for each label file has its path below the folder, the digest of
its content and the score of each row. A file whose digest differs has been edited since.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.utils.files import open_plain
from tessera.utils.text import shown

AUTO_LABELS = "auto_labels.jsonl"
MOST_AUTO_LABELS = 1 << 30  # bytes
AUTO_LABELS_SCHEMA = "tessera-auto-labels 1"
_ANY_NAME = "auto_labels*.jsonl"  # several runs may write to one folder


@dataclass(frozen=True)
class AutoLabel:
    """A label file that a model wrote."""

    weights: str  # --weights of detect.py
    names: tuple[str, ...]  # class names of the model
    sha256: str  # of the file's content
    least_score: float  # lowest score of its rows; 1 without rows


def auto_labels(folders: Iterable[Path], wrong: list[str]) -> dict[Path, AutoLabel]:
    """Return the last record of each label file in the lists of `folders`; append messages on bad lines to `wrong`."""
    found = dict[Path, AutoLabel]()
    for path in sorted(path for folder in folders for path in folder.glob(_ANY_NAME)):
        weights, names = "", tuple[str, ...]()
        try:
            with open_plain(path, MOST_AUTO_LABELS) as file:
                lines = file.readlines()
        except OSError as error:
            wrong.append(f"{path}: cannot be read ({error.strerror}). Remove it, or write the labels again.")
            continue
        for number, line in enumerate(lines, 1):
            try:
                entry: dict[str, Any] = json.loads(line)
                if "schema" in entry:
                    weights, names = str(entry["weights"]), tuple(map(str, entry["names"]))
                else:
                    least = min(map(float, entry["scores"]), default=1.0)
                    found[path.parent / entry["labels"]] = AutoLabel(weights, names, str(entry["sha256"]), least)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                text = shown(line.decode(errors="replace").strip())
                wrong.append(
                    f"{path}:{number}: found {text}, expected a line as --auto-label writes it; the line is ignored. "
                    "Remove it, or write the labels again."
                )
    return found
