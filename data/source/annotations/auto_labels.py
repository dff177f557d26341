"""`auto_labels.jsonl` beside label files: which of them a model wrote, so that they are told from a person's.

A line for a run, with the model's classes, then one for each label file that it wrote, with its path below the folder,
the digest of its content and the score of each row: a file that somebody has changed since is a person's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.utils.files import open_plain
from tessera.utils.text import shown

NAME = "auto_labels.jsonl"
SCHEMA = "tessera-auto-labels 1"
_ANY_NAME = "auto_labels*.jsonl"  # of several runs, in one folder


@dataclass(frozen=True)
class AutoLabel:
    """What is known of a label file that a model wrote."""

    weights: str  # of the model, as they were given to detect.py
    names: tuple[str, ...]  # of the model's classes, by the numbers in the file
    sha256: str  # of the file's content
    least_score: float  # of its rows; 1 where it has none


def auto_labels(folders: Iterable[Path], wrong: list[str]) -> dict[Path, AutoLabel]:
    """What the lists in `folders` say of label files, the last line of each; messages on bad lines go to `wrong`."""
    found = dict[Path, AutoLabel]()
    for path in sorted(path for folder in folders for path in folder.glob(_ANY_NAME)):
        weights, names = "", tuple[str, ...]()
        try:
            with open_plain(path) as file:
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
                    f"{path}:{number}: found {text}, expected a line as --auto-label writes it. It is "
                    "ignored; remove it, or write the labels again."
                )
    return found
