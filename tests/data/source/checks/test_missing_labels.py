"""Label file checks: images without labels, and labels without an image."""

from __future__ import annotations

from pathlib import Path

from tessera.data.source.index import index_warnings
from tests.data.make import write_dataset, write_image
from tests.data.source.annotations.test_voc import voc, voc_object, write_voc
from tests.data.source.made_yaml import BOX, build, check, write


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
