"""Dataset checks on real datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.source.made_yaml import check


def write_yaml(yaml: Path, root: Path, names: tuple[str, ...], *splits: str) -> Path:
    entries = "".join(f"{split}: images/{split}\n" for split in splits)
    yaml.write_text(f"path: {root}\n{entries}names: [{', '.join(names)}]\n")
    return yaml


def test_nothing_is_wrong_in_a_clean_set(shared: Path, tmp_path: Path) -> None:
    names = ("nine", "ten", "jack", "queen", "king", "ace")
    clean = check(write_yaml(tmp_path / "cards.yaml", shared / "cards", names, "train", "val"))
    assert (clean.errors, clean.problems) == ([], [])
    assert [line[:42] for line in clean.notes] == [
        "train: 1 image very dark (mean level below",
        "4 near-duplicates in train of images in tr",
    ]
    assert not any(drift.moved for drift in clean.drifts) and len(clean.drifts) == 4
    assert clean.facts[0].startswith("train: 296 images: 296 with objects") and clean.objects == 670


@pytest.mark.slow
def test_copies_in_a_real_set(shared: Path, tmp_path: Path) -> None:
    raccoon = write_yaml(tmp_path / "raccoon.yaml", shared / "raccoon", ("raccoon",), "train", "val")
    found = check(raccoon)
    assert not found.errors and [line[:33] for line in found.notes] == [
        "train: 3 images grey in a colour ",
        "2 near-duplicates in train of ima",
    ]
    line, pair = found.problems
    assert line.startswith("train: 4 images with several files that differ in their labels, such as images/train/")
    assert pair.startswith("1 near-duplicate in val of images in train, such as images/train/raccoon-21.jpg")
