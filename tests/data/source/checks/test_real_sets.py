"""Real sets: what is said of them is true, and nothing is said of one that is right."""

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
def test_of_other_real_sets_what_is_true_is_said(shared: Path, tmp_path: Path) -> None:
    """They have copies, scaled ones too, and labels of no image; nothing is guessed of their boxes or classes."""
    raccoon = write_yaml(tmp_path / "raccoon.yaml", shared / "raccoon", ("raccoon",), "train", "val")
    names = tuple(f"class{number}" for number in range(80))
    coco = write_yaml(tmp_path / "coco.yaml", shared / "coco128", names, "train2017")
    coco.write_text(coco.read_text().replace("train2017:", "train:"))
    found = check(raccoon)
    assert not found.errors and [line[:33] for line in found.notes] == [
        "train: 3 images grey in a colour ",
        "2 near-duplicates in train of ima",
    ]
    line, twins = found.problems
    assert line.startswith("train: 4 images with several files that differ in their labels, such as images/train/")
    assert twins.startswith("1 near-duplicate in val of images in train, such as images/train/raccoon-21.jpg")
    found = check(coco)
    assert [line.split(": ", 1)[1][:21] for line in found.errors] == ["names no val images. "]
    assert found.problems == [
        "labels/train2017: 2 label files without an image, objects not used: 000000000656.txt, 000000000659.txt"
    ]
    assert [line.partition(":")[2][:30] for line in found.notes] == [
        " 9 classes without an object: ",
        " 2 images without a label file",
        " 4 images grey in a colour dat",
    ]
