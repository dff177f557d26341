"""Checks of labels: unnamed and unused classes, and label files as a model wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.data.source.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tests.data.make import write_dataset
from tests.data.source.annotations.test_voc import voc_object, write_voc
from tests.data.source.made_yaml import BOX, check


def write_list(
    folder: Path, scores: dict[str, list[float]], name: str = "auto_labels.jsonl", names: tuple[str, ...] = ("cat",)
) -> Path:
    """A list of labels, as detect.py writes it."""
    lines: list[dict[str, Any]] = [{"schema": "tessera-auto-labels 1", "weights": "best.pt", "names": names}]
    lines += [{"labels": path, "sha256": sha256(folder / path), "scores": own} for path, own in scores.items()]
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder / name


def test_labels_of_a_model_are_counted_until_they_are_changed(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(
        root, {"train/a": BOX, "train/cam/b": BOX, "train/c": "", "train/d": BOX, "val/e": BOX}, names="[cat]"
    )
    before = check(yaml)
    write_list(root / "labels/train", {"a.txt": [0.9], "cam/b.txt": [0.8, 0.4], "c.txt": []})
    assert check(yaml).facts == [
        before.facts[0],
        "train: 3 of 4 label files (75 %) as a model wrote them ('best.pt')",
        "train: lowest scores, to review first: labels/train/cam/b.txt (0.40), labels/train/a.txt (0.90)",
        *before.facts[1:],
    ]
    (root / "labels/train/cam/b.txt").write_text(BOX + BOX.replace("0.5", "0.3"))
    assert (
        "train: 2 of 4 label files (50 %) as a model wrote them ('best.pt'); it wrote 1 more, changed since"
        in check(yaml).facts
    )


def test_a_validation_on_labels_of_a_model_is_a_problem(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "val/b": BOX, "val/c": BOX}, names="[cat]")
    labels = tmp_path / "pets/labels/val"
    write_list(labels, {"b.txt": [0.9]})
    path = write_list(labels, {"c.txt": [0.9]}, "auto_labels-2.jsonl")
    path.write_text(path.read_text() + "[]\nno line\n")
    assert check(yaml).problems == [
        *(
            f"{path}:{line}: found '{text}', expected a line as --auto-label writes it; the line is ignored. Remove "
            "it, or write the labels again."
            for line, text in ((3, "[]"), (4, "no line"))
        ),
        "val: 2 of 2 label files (100 %) as a model wrote them ('best.pt'): metrics on them measure agreement with "
        "that model",
    ]


def test_numbers_that_mean_another_class_to_the_model_are_an_error(tmp_path: Path) -> None:
    """As where `ignore` or a map gives the label files numbers of their own; classes that no row has do not matter."""
    root = tmp_path / "pets"
    row = "1 0.5 0.5 0.5 0.5\n"
    yaml = write_dataset(root, {"train/a": row, "train/b": row, "val/c": row}, names="{1: cat, 2: dog}")
    yaml.write_text(yaml.read_text() + "ignore: {0: cow}\n")
    write_list(root / "labels/train", {"a.txt": [0.9], "b.txt": [0.8]}, names=("bird", "dog"))
    assert check(yaml).errors == [
        "train: class 1 is 'dog' in the model 'best.pt' that wrote labels/train/a.txt, labels/train/b.txt, but 'cat' "
        f"in {yaml.name}. Renumber the rows; if both names mean one class, remove the files from auto_labels.jsonl."
    ]
    write_list(root / "labels/train", {"a.txt": [0.9], "b.txt": [0.8]}, names=("bird", "Cat"))
    assert check(yaml).errors == []


def labels(*classes: int) -> dict[str, str]:
    return {f"train/{at}": f"{number} 0.5 0.5 0.2 0.2\n" for at, number in enumerate(classes)}


@pytest.mark.parametrize(
    ("classes", "names", "from_one"),
    [
        ((1, 2, 2), "[cat, dog]", True),
        ((1, 1), "[cat]", True),
        ((0, 1, 2), "[cat, dog]", False),  # 0 is used
        ((1, 3), "[cat, dog]", False),  # 3 is too many in any case
        ((2, 2), "[cat, dog]", False),  # nothing but 2: no sign of a count
    ],
)
def test_classes_that_count_from_one(tmp_path: Path, classes: tuple[int, ...], names: str, from_one: bool) -> None:
    spec = load_spec(write_dataset(tmp_path / "pets", labels(*classes), names))
    (error, *_) = check_dataset(spec).errors
    assert ("count from 1. Subtract 1 from each class." in error) == from_one, error
    with pytest.raises(UserError) as caught:
        build_index(spec, "train")
    assert str(caught.value).startswith(error), "a run says the same"


def test_one_wrong_name_is_one_error_that_says_what_was_meant(tmp_path: Path) -> None:
    for number in range(9):
        write_voc(tmp_path / "voc", str(number), voc_object("Raccoon"), voc_object("dog"))
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nval: Annotations\nnames: [RACCOON, dog]\n")
    (error, _) = check(tmp_path / "voc.yaml").errors
    assert error.startswith("Annotations/0.xml:4: class 'Raccoon', but voc.yaml names 2 classes.")
    assert "Did you mean 'RACCOON'? There are 9 such rows; the next: Annotations/1.xml:4," in error


def test_names_and_classes_without_objects(tmp_path: Path) -> None:
    spec = load_spec(write_dataset(tmp_path / "pets", labels(0, 2), "[cat, dog, Cat, CAT, cow]"))
    found = check_dataset(spec)
    case, without = found.notes
    assert case.startswith("pets.yaml: the classes 'cat' and 'Cat' and 'CAT' differ only in case")
    assert without == "train: 3 classes without an object: 'dog', 'CAT', 'cow'"
    assert not check_dataset(spec, single_cls=True).notes
