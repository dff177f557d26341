"""`--check-data`: problems of every split, the verdict, and what it finds in real datasets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tessera.analysis.checks.results import PROBLEMS_CODE
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tests.data.labels.test_coco import coco, write_coco
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, check, write

DOGLESS = "train: 1 class without an object: 'dog'"


def test_clean(tmp_path: Path) -> None:
    labels = {"train/a": BOX, "train/b": "", "train/c": BOX + "1 0.5 0.5 0.25 0.5\n", "val/d": BOX}
    found = check(write_dataset(tmp_path / "pets", labels))
    assert found.exit_code == 0
    assert found.lines() == [
        "train: 3 images: 2 with objects; as background, 1 whose labels hold no object and 0 without a label file",
        "train: boxes at 640 px: 5 % are below 176 x 240, half below 320 x 240, 95 % below 320 x 240",
        "val: 1 image: 1 with objects; as background, 0 whose labels hold no object and 0 without a label file",
        "val: boxes at 640 px: 5 % are below 320 x 240, half below 320 x 240, 95 % below 320 x 240",
        "                 class  train img  train obj    val img    val obj",
        "                   cat          2          2          1          1",
        "                   dog          1          1          0          0",
        "4 images with 4 objects can be used: no errors, no problems",
    ]


def test_skipped_images_are_problems_not_errors(tmp_path: Path) -> None:
    found = check(
        write_dataset(tmp_path / "pets", {"train/a": BOX, "train/b": "x\ny\n", "train/c": BOX * 3, "val/d": BOX})
    )
    assert found.problems == [
        "labels/train/b.txt:1: 1 field, expected 5 (class x y w h) or a class and at least 3 points (class x1 y1 x2 y2 "
        "x3 y3 …); image skipped. There are 2 such rows; the next: labels/train/b.txt:2"
    ]
    assert found.notes == ["labels/train/c.txt: 2 rows are duplicates, used once", DOGLESS]
    assert found.lines()[-1] == (
        "3 images with 3 objects can be used; 1 image skipped (images/train/b.jpg): no errors; 1 problem costs labels "
        "or trust in the metrics; 2 notes"
    )


def test_what_no_training_reads_is_no_error(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "val/b": BOX, "test/c": "7 0.5 0.5 0.1 0.1\n"})
    found = check(yaml)
    assert found.exit_code == PROBLEMS_CODE and "labels/test/c.txt:1: class 7" in found.problems[0]
    shutil.rmtree(tmp_path / "pets/images/test")
    found = check(yaml)
    assert found.exit_code == 0 and found.notes[0].startswith("no training needs `test`: ")
    assert "does not exist" in found.notes[0]
    (tmp_path / "pets/images/test").mkdir()
    found = check(yaml)
    assert found.exit_code == PROBLEMS_CODE and "test: no image found in" in found.problems[0]


def test_classes_of_a_coco_file_need_no_test_set(tmp_path: Path) -> None:
    yaml = write_coco(tmp_path / "set", coco())
    entry = "annotations/instances_train.json"
    found = check(write(yaml, f"path: {tmp_path}/set\ntrain: {entry}\nval: {entry}\ntest: annotations/gone.json\n"))
    assert found.names == ("cat", "dog") and not found.errors and "does not exist" in found.notes[0]


def test_image_that_breaks_in_the_middle(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "val/b": BOX})
    path = write_image(tmp_path / "pets/images/train/c.png", (64, 64))
    (tmp_path / "pets/labels/train/c.txt").touch()
    raw = path.read_bytes()
    path.write_bytes(raw[:200] + raw[-100:])
    found = check(yaml)
    assert (found.exit_code, found.images, found.skipped_images) == (PROBLEMS_CODE, 2, ["images/train/c.png"])
    assert found.problems[0].startswith("images/train/c.png: ")
    for name in "ac":
        (tmp_path / f"pets/images/train/{name}.png").write_bytes(raw[:200] + raw[-100:])
    (tmp_path / "pets/images/train/a.jpg").unlink()
    assert check(yaml).errors[0].startswith("train: 2 of 2 images do not decode, more than training skips")


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_what_follows_the_end_of_an_image_is_no_damage(tmp_path: Path, suffix: str) -> None:
    """Phones keep a video behind a photograph; a preview's end in the headers is not the image's own."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "val/b": BOX})
    path = write_image(tmp_path / f"pets/images/train/c{suffix}", (200, 200))
    (tmp_path / "pets/labels/train/c.txt").touch()
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(10_000))
    assert not check(yaml).problems
    if suffix == ".jpg":
        path.write_bytes(whole[:2] + b"\xff\xe1\0\x06\xff\xd9\xff\xd9" + whole[2 : len(whole) // 2])
        said = f"images/train/c{suffix}: truncated file; the decodable part is used"
        assert check(yaml).problems == [said]


def test_copies_are_found_whatever_their_names(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "train/b": BOX, "train/c": BOX, "val/c": BOX, "test/c": BOX})
    for split, name in (("val", "d"), ("test", "e"), ("train", "f"), ("train", "g")):
        shutil.copy(root / "images/train/a.jpg", root / f"images/{split}/{name}.jpg")
        (root / f"labels/{split}/{name}.txt").write_text(BOX)
    found = check(yaml)
    used = "metrics on training images are too good"
    assert found.problems == [
        f"1 of the 2 images of val is in train too, such as images/train/a.jpg = images/val/d.jpg: {used}",
        f"1 of the 2 images of test is in train too, such as images/train/a.jpg = images/test/e.jpg: {used}",
    ]
    same = "images/train/a.jpg = images/train/f.jpg = images/train/g.jpg"
    assert found.notes == [
        DOGLESS,
        f"train: 1 image with several files and equal labels, such as {same}",
        "1 of the 2 images of test is in val too, such as images/val/d.jpg = images/test/e.jpg",
    ]
    (root / "labels/train/g.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    differ = (
        f"train: 1 image with several files that differ in their labels, such as {same}: remove all but the correct"
    )
    assert any(line.startswith(differ) for line in check(yaml).problems)


def test_what_a_run_is_warned_of(tmp_path: Path) -> None:
    flat = "0 0.5 0.5 0 0.1\n"
    labels = {"train/a": BOX + flat, "train/b": BOX, "val/c": BOX + flat + "1 0.5 0.5 0.1 0\n", "test/d": ""}
    spec = load_spec(write_dataset(tmp_path / "pets", labels))
    train, val, test = (index_warnings(build_index(spec, split)) for split in ("train", "val", "test"))
    said = "without width or height, not learned; --check-data lists them"
    assert train == [f"train: 1 box {said}"]
    said = "without width or height, counted as missed objects; --check-data lists them"
    assert val == [f"val: 2 boxes {said}"]
    spec = load_spec(write_dataset(tmp_path / "flat", {"train/a": flat * 2 + flat.replace("0.1", "0.2")}))
    assert index_warnings(build_index(spec, "train"))[-1].startswith("train: all 2 boxes without width or height")
    (message,) = test
    assert "test: no object in the labels of its 1 image, so mAP will be 0" in message


def test_more_objects_than_detections_are_said(tmp_path: Path) -> None:
    dense = "".join(f"0 {(n % 20 + 0.5) / 20} {(n // 20 + 0.5) / 20} 0.04 0.04\n" for n in range(400))
    yaml = write_dataset(tmp_path / "pets", {"train/a": dense, "val/b": dense, "val/c": BOX, "val/d": dense})
    train, val = (build_index(load_spec(yaml), split) for split in ("train", "val"))
    (said,) = index_warnings(val, 300)
    assert said == (
        "val: 2 images with more objects than --max-det 300: b.jpg (400), d.jpg (400). Recall over all objects is at "
        "most 0.750, and mAP is limited too. Give --max-det 400."
    )
    assert index_warnings(val, 400) == index_warnings(train) == [] != index_warnings(train, 399)
    (said,) = index_warnings(val)
    assert "the 300 detections an image that a training evaluates: " in said and "val.py --max-det 400" in said
    assert [line for line in check(yaml).problems if "max-det" in line] == [
        said.replace("b.jpg", "images/val/b.jpg").replace("d.jpg", "images/val/d.jpg")
    ]


def test_missing_folder_and_labels_are_errors(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": None})
    found = check(write(yaml, yaml.read_text() + "val: images/val\n"))
    assert ["no labels found" in line or "does not exist" in line for line in found.errors] == [True, True]
    assert found.exit_code == 1


def test_a_class_that_no_coco_file_has_is_noted(tmp_path: Path) -> None:
    yaml = write_coco(tmp_path / "set", coco())
    found = check(write(yaml, yaml.read_text().replace("[cat, dog]", "[cat, cow, dog, Dog]")))
    assert found.notes[1:] == [
        "annotations/instances_train.json: found no category named 'cow', 'Dog', which coco.yaml names as classes"
    ]
    assert not check(yaml, single_cls=True).notes


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
    assert not any(drift.changed for drift in clean.drifts) and len(clean.drifts) == 4
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
