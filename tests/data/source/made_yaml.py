"""A little dataset and its YAML, for the tests of what a YAML may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.source.spec import load_spec
from tessera.utils.errors import UserError
from tests.data.make import write_image

BODY = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


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


def refuse(path: Path, text: str, what: str) -> None:
    write(path / "a.yaml", text)
    with pytest.raises(UserError, match=what):
        load_spec(path / "a.yaml")
