"""Helpers that write small datasets, and index, check or refuse them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.analysis.checks.results import DatasetCheck
from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tessera.utils.types import DatasetIndex
from tests.data.make import write_image

BODY = "train: images/train\nval: images/val\nnames: [cat, dog]\n"
BOX = "0 0.5 0.5 0.5 0.5\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def dataset(root: Path) -> Path:
    """A folder with an image in train and in val."""
    for split in ("train", "val"):
        write_image(root / "images" / split / "a.jpg")
        write(root / "labels" / split / "a.txt", "0 0.5 0.5 0.2 0.2\n")
    return root


def coco_set(
    root: Path, images: Mapping[str, Sequence[Mapping[str, Any]]], categories: Mapping[int, str], more: str = ""
) -> Path:
    """Write set.json for images and their annotations; return a YAML with it as train and val."""
    content = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(images, 1)],
        "categories": [{"id": number, "name": name} for number, name in categories.items()],
        "annotations": [{"image_id": own, **row} for own, rows in enumerate(images.values(), 1) for row in rows],
    }
    write(root / "set.json", json.dumps(content))
    return write(root / "coco.yaml", f"path: {root}\ntrain: set.json\nval: set.json\n{more}")


def write_list(
    folder: Path, scores: dict[str, list[float]], name: str = "auto_labels.jsonl", names: tuple[str, ...] = ("cat",)
) -> Path:
    """A list of labels, as detect.py writes it."""
    lines: list[dict[str, Any]] = [{"schema": "tessera-auto-labels 1", "weights": "best.pt", "names": names}]
    lines += [{"labels": path, "sha256": sha256(folder / path), "scores": own} for path, own in scores.items()]
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder / name


def build(yaml: Path, split: str = "train", **options: Any) -> DatasetIndex:
    return build_index(load_spec(yaml), split, **options)


def check(yaml: Path, single_cls: bool = False) -> DatasetCheck:
    return check_dataset(load_spec(yaml), single_cls)


def refuse(path: Path, text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        load_spec(write(path / "a.yaml", text))


def same(a: DatasetIndex, b: DatasetIndex) -> bool:
    plain = all(getattr(a, name) == getattr(b, name) for name in ("split", "names", "digest", "problems", "notes"))
    arrays = {name: value for name, value in vars(a).items() if isinstance(value, np.ndarray)}
    return plain and all(
        np.array_equal(value, getattr(b, name)) and value.dtype == getattr(b, name).dtype
        for name, value in arrays.items()
    )
