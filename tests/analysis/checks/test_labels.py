"""Label checks of `--check-data`: classes, missing labels, and labels of `--auto-label` that nobody has edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tessera.utils.training.data import warn_of_problems
from tests.data.labels.test_voc import voc, voc_object, write_voc
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, check, write


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


def test_a_class_that_train_lacks_is_a_problem_where_another_split_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ignored regions of train teach nothing; what no split has stays a note, and excluded classes are nothing."""
    dog, crowd = "1 0.5 0.5 0.5 0.5\n", "-1 0.5 0.5 0.5 0.5\n"
    files = {"train/a": BOX, "train/b": crowd, "val/c": BOX + dog + dog.replace("0.5", "0.4"), "test/d": dog}
    yaml = write_dataset(tmp_path / "pets", files, "[cat, dog, cow]")
    found = check(yaml)
    of_val, of_test = (line for line in found.problems if "dog" in line)
    assert of_val.startswith("val: 2 objects of 'dog', but train has none to learn from")
    assert of_test.startswith("test: 1 object of 'dog'") and found.exit_code == 3
    assert "train: 1 class without an object: 'cow'" in found.notes
    assert not check(yaml, single_cls=True).problems
    with caplog.at_level("WARNING"):
        warn_of_problems(str(yaml), build(yaml, "train"), build(yaml, "val"))
    assert caplog.messages[0] == of_val
    yaml.write_text(yaml.read_text() + "classes: [cat]\n")
    assert "dog" not in "".join(check(yaml).problems)


def problems(yaml: Path) -> list[str]:
    return check(yaml).problems


def missing_labels(root: Path, missing: int) -> Path:
    labels = {f"train/{number}": BOX if number >= missing else None for number in range(20)}
    return write_dataset(root, {**labels, "val/a": BOX}, names="[cat]")


def test_missing_label_files_are_a_problem_where_they_are_many(tmp_path: Path) -> None:
    yaml = missing_labels(tmp_path / "many", 3)
    said = "train: 3 of 20 images have no label file and are used as background: images/train/0.jpg"
    (line,) = problems(yaml)
    (warning,) = index_warnings(build(yaml))
    assert line.startswith(said) and said in warning and "--check-data" in warning
    few = check(missing_labels(tmp_path / "few", 2))
    assert not few.problems
    assert few.notes == [
        "train: 2 images without a label file, used as background: images/train/0.jpg, images/train/1.jpg"
    ]
    assert "18 with objects; as background, 0 whose labels hold no object and 2 without a label file" in few.facts[0]


def test_a_validation_set_without_objects(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "unlabelled", {"train/a": BOX, "val/b": None, "val/c": None}, names="[cat]")
    assert problems(yaml) == ["val: none of its 2 images has a label file, such as images/val/b.jpg"]
    yaml = write_dataset(tmp_path / "empty", {"train/a": BOX, "val/b": "", "val/c": ""}, names="[cat]")
    (line,) = problems(yaml)
    assert line.startswith("val: no object in the labels of its 2 images, so mAP will be 0")
    assert line in index_warnings(build(yaml, "val"))


def test_labels_of_no_image(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "val/b": BOX}, names="[cat]")
    for name, text in {"lost": BOX, "more": BOX, "empty": "", "classes": "cat\ndog\n", "README": "of pets"}.items():
        (root / f"labels/train/{name}.txt").write_text(text)
    assert problems(yaml) == ["labels/train: 2 label files without an image, objects not used: lost.txt, more.txt"]
    # What the YAML does not list is no loss, as long as its image is there.
    write_image(root / "images/train/lost.png")
    (root / "list.txt").write_text("images/train/a.jpg\n")
    yaml.write_text(yaml.read_text().replace("train: images/train", "train: list.txt"))
    assert problems(yaml) == ["labels/train: 1 label file without an image, objects not used: more.txt"]


def test_images_that_share_a_label_file(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "train/b": BOX, "val/c": BOX}, names="[cat]")
    write_image(root / "images/train/a.png", seed=7)
    (line,) = problems(yaml)
    said = "1 label file of several images, each of which gets all boxes: labels/train/a.txt (images/train/a.jpg, "
    assert line.startswith(f"{said}images/train/a.png).")
    (warning,) = index_warnings(build(yaml))
    assert line in warning
    (root / "list.txt").write_text("images/train/b.jpg\nimages/train/a.jpg\n")
    (root / "other.txt").write_text("images/train/a.png\nimages/val/c.jpg\n")
    assert problems(write(yaml, f"path: {root}\ntrain: list.txt\nval: other.txt\nnames: [cat]\n")) == [line]


def test_xml_of_no_image(tmp_path: Path) -> None:
    root = tmp_path / "voc"
    write_voc(root, "a", voc_object())
    (root / "Annotations/lost.xml").write_bytes(voc(voc_object()))
    yaml = tmp_path / "voc.yaml"
    for entry, said in (
        ("Annotations", "XML file without an image of that name"),
        ("JPEGImages", "label file without"),
    ):
        (line,) = problems(write(yaml, f"path: voc\ntrain: {entry}\nnames: [cat]\n"))
        assert f"1 {said}" in line and "lost.xml" in line
