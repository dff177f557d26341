"""Many kinds of mistakes in a copy of a real set, each named; and real sets, of which nothing wrong is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.data.source.checks.dataset import check_dataset
from tessera.data.source.checks.report import DatasetCheck
from tessera.data.source.spec import load_spec

NAMES = ("nine", "ten", "jack", "queen", "king", "ace")
KINDS = {  # kind → what the check says of it, and how grave
    "labels deleted": ("problem", r"train: 59 of 29\d images have no label file"),
    "labels of no image": ("problem", r"labels/train: 5 label files of no image"),
    "corners": ("error", r"val: 1\d\d of 1\d\d boxes \(\d+ %\) seem to be written as x1 y1 x2 y2"),
    "beyond the border": ("problem", r"train: 12 of \d+ boxes \(.*%\) reach beyond the border .* by up to 20 %"),
    "train in val": ("problem", r"3 of the 70 images of val are in train too"),
    "copies with other labels": ("problem", r"train: 2 pictures with several files that differ in their labels"),
    "classes from 1": ("error", r"test/\w+.txt:1: class 6, but cards.yaml names classes from 0 to 5.* count from 1"),
    "an unknown class": ("error", r"labels/train/\w+.txt:1: class 77, .* There are 4 such rows"),
    "names by case": ("problem", r"the classes 'ace' and 'ACE' differ by case alone"),
    "a class without an object": ("note", r"train: 1 class without an object: 'ACE'"),
    "a damaged picture": ("problem", r"images/train/\w+.jpg: not an image that OpenCV can decode"),
    "a cut picture": ("note", r"images/train/\w+.jpg: the end of the file is missing"),
    "a short row": ("problem", r"labels/train/\w+.txt:1: 4 fields, expected 5"),
    "a row twice": ("problem", r"labels/train/\w+.txt: 1 row is a duplicate"),
    "a flat box": ("note", r"labels/train/\w+.txt: 1 box without width or height"),
}


@pytest.fixture(scope="module")
def checked(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetCheck, DatasetCheck]:
    """What is said of cards, and of the copy with mistakes."""
    root = tmp_path_factory.mktemp("planted") / "cards"
    clean = write_yaml(root.with_name("clean.yaml"), shared / "cards", NAMES, "train", "val")
    for split in ("train", "val"):
        copy(shared / "cards", root, split, split)
    copy(shared / "cards", root, "val", "test", most=20)
    plant(root)
    wrong = write_yaml(root.with_name("cards.yaml"), root, NAMES, "train", "val", "test")
    named = wrong.with_name("named.yaml")
    named.write_text(f"path: {root}\ntrain: images/val\nnames: [{', '.join([*NAMES, 'ACE'])}]\n")
    first, second = (check_dataset(load_spec(yaml)) for yaml in (wrong, named))
    first.problems += [line for line in second.problems if "by case" in line]
    first.notes += [line for line in second.notes if "without an object" in line]
    return check_dataset(load_spec(clean)), first


def write_yaml(yaml: Path, root: Path, names: tuple[str, ...], *splits: str) -> Path:
    entries = "".join(f"{split}: images/{split}\n" for split in splits)
    yaml.write_text(f"path: {root}\n{entries}names: [{', '.join(names)}]\n")
    return yaml


def copy(source: Path, root: Path, split: str, to: str, most: int = 1000) -> None:
    """Pictures as links; labels are written anew."""
    for kind in ("images", "labels"):
        (root / kind / to).mkdir(parents=True)
    for picture in sorted((source / "images" / split).iterdir())[:most]:
        (root / "images" / to / picture.name).symlink_to(picture)
        label = (source / "labels" / split / picture.name).with_suffix(".txt").read_text()
        (root / "labels" / to / picture.name).with_suffix(".txt").write_text(label)


def plant(root: Path) -> None:
    """A mistake of each kind but those of the YAML, each in files of its own."""
    pictures = iter(sorted((root / "images/train").iterdir()))

    def take(count: int) -> Iterator[tuple[Path, Path]]:
        for _ in range(count):
            picture = next(pictures)
            yield picture, root / "labels/train" / f"{picture.stem}.txt"

    def rewrite(path: Path, change: Callable[[list[str]], list[str]]) -> None:
        path.write_text("".join(" ".join(change(row.split())) + "\n" for row in path.read_text().splitlines()))

    for _, label in take(59):
        label.unlink()
    for picture, _ in take(5):
        picture.unlink()
    for _, label in take(12):
        label.write_text("0 0.9 0.5 0.6 0.5\n")
    for number, (picture, _) in enumerate(take(3)):
        (root / f"images/val/again{number}.jpg").symlink_to(picture.resolve())
        (root / f"labels/val/again{number}.txt").write_text("2 0.5 0.5 0.2 0.2\n")
    for number, (picture, _) in enumerate(take(2)):
        (root / f"images/train/twice{number}.jpg").symlink_to(picture.resolve())
        (root / f"labels/train/twice{number}.txt").write_text("2 0.5 0.5 0.2 0.2\n")
    for _, label in take(4):
        label.write_text("77 0.5 0.5 0.2 0.2\n")
    for broken in (b"no picture", None):
        ((picture, _),) = take(1)
        raw = picture.read_bytes()
        picture.unlink()
        picture.write_bytes(broken or raw[:-3000])
    for text in ("1 0.5 0.5 0.2\n", "1 0.5 0.5 0.2 0.2\n" * 2, "1 0.5 0.5 0.2 0.2\n1 0.5 0.5 0 0.2\n"):
        ((_, label),) = take(1)
        label.write_text(text)
    for label in (root / "labels/val").iterdir():
        rewrite(label, as_corners)
    for label in (root / "labels/test").iterdir():
        rewrite(label, lambda row: [str(int(row[0]) + 1), *row[1:]])


def as_corners(row: list[str]) -> list[str]:
    x, y, width, height = map(float, row[1:])
    corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return [row[0], *(f"{min(max(corner, 0), 1):.6f}" for corner in corners)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named(kind: str, checked: tuple[DatasetCheck, DatasetCheck]) -> None:
    grave, said = KINDS[kind]
    _, wrong = checked
    found = {"error": wrong.errors, "problem": wrong.problems, "note": wrong.notes}[grave]
    assert sum(re.search(said, line) is not None for line in found) == 1, "\n".join(wrong.lines())


def test_nothing_else_is_named(checked: tuple[DatasetCheck, DatasetCheck]) -> None:
    _, wrong = checked
    test_is_val = r"\d+ of the 20 images of test are in (train|val) too"  # where its pictures come from
    known = [said for _, said in KINDS.values()] + [test_is_val]
    lines = [*wrong.errors, *wrong.problems, *wrong.notes]
    assert not [line for line in lines if not any(re.search(said, line) for said in known)]


def test_nothing_is_wrong_in_the_clean_set(checked: tuple[DatasetCheck, DatasetCheck]) -> None:
    clean, _ = checked
    assert (clean.errors, clean.problems, clean.notes) == ([], [], [])
    assert clean.facts[0].startswith("train: 296 images: 296 with objects") and clean.objects == 670


@pytest.mark.slow
def test_of_other_real_sets_what_is_true_is_said(shared: Path, tmp_path: Path) -> None:
    """They have copies, and labels of no image; nothing is guessed of their boxes or classes."""
    raccoon = write_yaml(tmp_path / "raccoon.yaml", shared / "raccoon", ("raccoon",), "train", "val")
    names = tuple(f"class{number}" for number in range(80))
    coco = write_yaml(tmp_path / "coco.yaml", shared / "coco128", names, "train2017")
    coco.write_text(coco.read_text().replace("train2017:", "train:"))
    found = check_dataset(load_spec(raccoon))
    assert not found.errors and not found.notes
    (line,) = found.problems
    assert line.startswith("train: 4 pictures with several files that differ in their labels, such as images/train/")
    found = check_dataset(load_spec(coco))
    assert [line.split(": ", 1)[1][:21] for line in found.errors] == ["names no val images. "]
    assert found.problems == [
        "labels/train2017: 2 label files of no image, so their objects are not used: 000000000656.txt, 000000000659.txt"
    ]
    assert [line.partition(":")[2][:30] for line in found.notes] == [
        " 9 classes without an object: ",
        " 2 images without a label file",
    ]
