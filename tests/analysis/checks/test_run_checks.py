"""Dataset checks: classes, label files, boxes, the verdict, and what they find in real datasets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tessera.analysis.checks.results import PROBLEMS_CODE, DatasetCheck
from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tessera.utils.errors import UserError
from tessera.utils.training.data import warn_of_problems
from tests.data.labels.test_coco import coco, write_coco
from tests.data.labels.test_voc import voc, voc_object, write_voc
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, check, coco_set, write, write_list

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


def test_missing_label_files_are_a_problem_where_they_are_many(tmp_path: Path) -> None:
    files: dict[str, str | None] = {"val/a": BOX, **{f"train/{number}": BOX for number in range(20)}}
    yaml = write_dataset(tmp_path / "many", files | dict.fromkeys(["train/0", "train/1", "train/2"]), names="[cat]")
    said = "train: 3 of 20 images have no label file and are used as background: images/train/0.jpg"
    (line,) = check(yaml).problems
    (warning,) = index_warnings(build(yaml))
    assert line.startswith(said) and said in warning and "--check-data" in warning
    few = check(write_dataset(tmp_path / "few", files | dict.fromkeys(["train/0", "train/1"]), names="[cat]"))
    said = "train: 2 images without a label file, used as background: images/train/0.jpg, images/train/1.jpg"
    assert not few.problems and few.notes == [said]
    assert "18 with objects; as background, 0 whose labels hold no object and 2 without a label file" in few.facts[0]


def test_a_validation_set_without_objects(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "unlabelled", {"train/a": BOX, "val/b": None, "val/c": None}, names="[cat]")
    assert check(yaml).problems == ["val: none of its 2 images has a label file, such as images/val/b.jpg"]
    yaml = write_dataset(tmp_path / "empty", {"train/a": BOX, "val/b": "", "val/c": ""}, names="[cat]")
    (line,) = check(yaml).problems
    assert line.startswith("val: no object in the labels of its 2 images, so mAP will be 0")
    assert line in index_warnings(build(yaml, "val"))


def test_labels_of_no_image(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "val/b": BOX}, names="[cat]")
    for name, text in {"lost": BOX, "more": BOX, "empty": "", "classes": "cat\ndog\n", "README": "of pets"}.items():
        (root / f"labels/train/{name}.txt").write_text(text)
    assert check(yaml).problems == [
        "labels/train: 2 label files without an image, objects not used: lost.txt, more.txt"
    ]
    # What the YAML does not list is no loss, as long as its image is there.
    write_image(root / "images/train/lost.png")
    (root / "list.txt").write_text("images/train/a.jpg\n")
    yaml.write_text(yaml.read_text().replace("train: images/train", "train: list.txt"))
    assert check(yaml).problems == ["labels/train: 1 label file without an image, objects not used: more.txt"]


def test_images_that_share_a_label_file(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "train/b": BOX, "val/c": BOX}, names="[cat]")
    write_image(root / "images/train/a.png", seed=7)
    (line,) = check(yaml).problems
    said = "1 label file of several images, each of which gets all boxes: labels/train/a.txt (images/train/a.jpg, "
    assert line.startswith(f"{said}images/train/a.png).")
    (warning,) = index_warnings(build(yaml))
    assert line in warning
    (root / "list.txt").write_text("images/train/b.jpg\nimages/train/a.jpg\n")
    (root / "other.txt").write_text("images/train/a.png\nimages/val/c.jpg\n")
    assert check(write(yaml, f"path: {root}\ntrain: list.txt\nval: other.txt\nnames: [cat]\n")).problems == [line]


def test_xml_of_no_image(tmp_path: Path) -> None:
    root = tmp_path / "voc"
    write_voc(root, "a", voc_object())
    (root / "Annotations/lost.xml").write_bytes(voc(voc_object()))
    yaml = tmp_path / "voc.yaml"
    for entry, said in (
        ("Annotations", "XML file without an image of that name"),
        ("JPEGImages", "label file without"),
    ):
        (line,) = check(write(yaml, f"path: voc\ntrain: {entry}\nnames: [cat]\n")).problems
        assert f"1 {said}" in line and "lost.xml" in line


Box = tuple[float, float, float, float]  # corners, as fractions
Write = Callable[[Path, list[list[Box]], bool], Path]


def boxes(seed: int, most: float) -> list[list[Box]]:
    """Boxes inside 30 images, with sides of at most `most` of the image's."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(30):
        sizes = rng.uniform(0.1, most, (2, 2))
        corners = rng.random((2, 2)) * (1 - sizes)
        found.append([tuple(row) for row in np.hstack((corners, corners + sizes)).round(4).tolist()])
    return found


def as_text(root: Path, objects: list[list[Box]], wrong: bool) -> Path:
    """YOLO labels; where `wrong`, x1 y1 x2 y2 instead of x y w h."""

    def row(box: Box) -> str:
        left, top, right, bottom = box
        numbers = box if wrong else ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
        return "0 " + " ".join(f"{number:.5f}" for number in numbers) + "\n"

    labels = {f"train/{number}": "".join(map(row, own)) for number, own in enumerate(objects)}
    return write_dataset(root, {**labels, "val/a": "0 0.5 0.5 0.2 0.2\n"}, names="[cat]")


def as_coco(root: Path, objects: list[list[Box]], wrong: bool) -> Path:
    """COCO; where `wrong`, x1 y1 x2 y2 instead of x y width height."""
    images = {}
    for number, own in enumerate(objects):
        write_image(root / f"{number}.png", (40, 50), seed=number)
        corners = [(left * 50, top * 40, right * 50, bottom * 40) for left, top, right, bottom in own]
        boxes = [(x1, y1, x2 - (not wrong) * x1, y2 - (not wrong) * y1) for x1, y1, x2, y2 in corners]
        images[f"{number}.png"] = [{"category_id": 1, "bbox": box} for box in boxes]
    return coco_set(root, images, {1: "cat"})


def said(check: DatasetCheck) -> list[str]:
    return [line for line in [*check.errors, *check.problems] if " are in train too" not in line]


@pytest.mark.parametrize("write", [as_text, as_coco])
@pytest.mark.parametrize("most", [0.2, 0.95])
def test_corners_are_known_whatever_the_size_of_the_objects(tmp_path: Path, write: Write, most: float) -> None:
    clean = check(write(tmp_path / "clean", boxes(0, most), False))
    assert said(clean) == []
    wrong = check(write(tmp_path / "wrong", boxes(0, most), True))
    assert wrong.errors and all("seem to be written as x1 y1 x2 y2" in line for line in said(wrong))


def test_a_part_of_the_files_in_corners(tmp_path: Path) -> None:
    yaml = as_text(tmp_path / "pets", boxes(1, 0.4), False)
    odd = as_text(tmp_path / "odd", boxes(1, 0.4), True).parent / "odd/labels/train"
    for number in range(8):
        (odd / f"{number}.txt").rename(tmp_path / f"pets/labels/train/{number}.txt")
    (line,) = said(check(yaml))
    assert line.startswith("train: 16 of 60 boxes (27 %) seem to be written as x1 y1 x2 y2, expected centre x")
    assert "labels/train/0.txt, labels/train/1.txt, labels/train/2.txt, and 5 more. Convert these labels." in line


def test_boxes_beyond_the_border(tmp_path: Path) -> None:
    own = [[(0.1, 0.1, 0.5, 0.5)]] * 9 + [[(0.7, 0.2, 1.2, 0.5)]]
    text = check(as_text(tmp_path / "text", own, False))
    reach = "train: 1 of 10 boxes (10 %) exceeds its image by up to 20 % of its side"
    assert said(text) == [f"{reach}: labels/train/9.txt"]
    coco = check(as_coco(tmp_path / "coco", own, False))
    assert said(coco) == [
        line.format(s) for s in ("train", "val") for line in [reach.replace("train", "{}") + ": 9.png (set.json)"]
    ]
    far = json.loads((tmp_path / "coco/set.json").read_text())
    far["annotations"][0]["bbox"][2] = 1e308
    (tmp_path / "coco/set.json").write_text(json.dumps(far))
    assert all("by more than 1,000 % of" in line for line in said(check(tmp_path / "coco/coco.yaml")))
    root = tmp_path / "voc"
    for number, right in enumerate((64, 65, 90)):
        write_image(root / f"{number}.jpg", seed=number)
        (root / f"{number}.xml").write_bytes(voc(voc_object(box=f"1 1 {right} 48")))
    found = check(write(tmp_path / "voc.yaml", "path: voc\ntrain: .\nnames: [cat]\n")).problems
    assert found == ["train: 1 of 3 boxes (33 %) exceeds its image by up to 41 % of its side: 2.xml"], (
        "a pixel more is how some count"
    )
