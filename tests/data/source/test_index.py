"""The dataset index: contents and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tessera.data.source.annotations.label_files import label_path
from tessera.data.source.decode import image_size
from tessera.data.source.index import problem_report
from tessera.utils.errors import UserError
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, same, write


def test_contents(tmp_path: Path) -> None:
    two = "1 0.5 0.5 0.25 0.5\n0 0.25 0.25 0.5 0.5"
    labels = {"train/b": two, "train/a": BOX, "train/c": None, "train/d": "", "val/a": BOX}
    yaml = write_dataset(tmp_path / "pets", labels)
    index = build(yaml)
    assert [index.path(i) for i in range(4)] == [tmp_path / f"pets/images/train/{name}.jpg" for name in "abcd"]
    assert index.sizes_hw.tolist() == [[48, 64]] * 4
    classes, boxes = index.labels(1)
    assert classes.tolist() == [1, 0]
    np.testing.assert_array_equal(boxes, [[24, 12, 40, 36], [0, 0, 32, 24]])
    assert [len(index.labels(i)[0]) for i in range(4)] == [1, 2, 0, 0]
    assert index.segments(0) == [] and len(index.segment_offsets) == 0
    assert (index.names, index.split) == (("cat", "dog"), "train")
    assert index.problems == (
        "train: 1 of 4 images has no label file and is used as background: images/train/c.jpg. "
        "Restore their labels, or add an empty label file to each background image",
    )
    assert [index.classes.dtype, index.boxes_xyxy.dtype, index.sizes_hw.dtype] == [np.int32, np.float32, np.int32]


def test_polygons(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "1 0.25 0.25 0.5 0.25 0.5 0.75\n" + BOX, "train/b": BOX})
    index = build(yaml)
    np.testing.assert_array_equal(index.labels(0)[1], [[16, 12, 32, 36], [16, 12, 48, 36]])
    polygon, none = index.segments(0)
    np.testing.assert_array_equal(polygon, [[16, 12], [32, 12], [32, 36]])
    assert none.shape == (0, 2) and [len(p) for p in index.segments(1)] == [0]


def test_problems_leave_the_image_out_and_name_the_line(tmp_path: Path) -> None:
    labels = {"train/a": BOX, "train/b": BOX + "1 0.5 2 0.1 0.1\n1 x 1 1 1\n", "train/c": BOX + BOX}
    yaml = write_dataset(tmp_path / "pets", {**labels, "train/d": "\ufeff" + BOX})
    write_image(tmp_path / "pets/images/train/small.png", (9, 50))
    (tmp_path / "pets/images/train/torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    index = build(yaml)
    assert [index.path(i).stem for i in range(len(index))] == ["a", "c", "d"]
    assert len(index.classes) == 3
    left_out = "; image skipped"
    assert index.problems == (
        "labels/train/b.txt:2: y is 2, expected at most 1 (a fraction of the image's width or height)" + left_out,
        "labels/train/b.txt:3: 'x' is not a number" + left_out,
        "images/train/small.png: 50 x 9 pixels, expected at least 10 on each side" + left_out,
        "images/train/torn.png: not an image that OpenCV or Pillow can decode, or damaged" + left_out,
    )
    assert index.notes == ("labels/train/c.txt: 1 row is a duplicate, used once",)
    report = problem_report(index)
    assert report.startswith(
        "train: 4 problems with images or labels (all: --check-data):\n  labels/train/b.txt:2: y is 2"
    )
    assert (
        "\ntrain: 1 note on images or labels (all: --check-data):\n  labels/train/c.txt: 1 row is a duplicate" in report
    )


def test_unknown_class_has_the_promised_message(tmp_path: Path) -> None:
    yaml = write_dataset(
        tmp_path / "pets", {"train/a": BOX, "train/0123": BOX * 1 + "\n\n81 0.5 0.5 0.1 0.1\n2 0 0 1 1"}
    )
    with pytest.raises(UserError) as caught:
        build(yaml)
    assert str(caught.value) == (
        "labels/train/0123.txt:4: class 81, but pets.yaml names 2 classes. Fix the label or add the class.\n"
        "  labels/train/0123.txt:5: class 2, but pets.yaml names 2 classes. Fix the label or add the class."
    )


def test_no_labels_in_train_says_where_it_looked(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": None, "train/b": "", "val/a": None})
    with pytest.raises(UserError, match="no labels found for 2 images: 1 of them have a label file") as caught:
        build(yaml)
    assert str(tmp_path / "pets/labels/train/a.txt") in str(caught.value)
    assert len(build(yaml, "val")) == 1


def test_missing_split_folder_and_images(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX})
    with pytest.raises(UserError, match=r"found train, expected `val`.* `val: 0\.2` holds out a fifth of train"):
        build(yaml, "val")
    yaml.write_text(yaml.read_text() + f"val: images/val\ntest: {tmp_path}/empty\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"val: {tmp_path}/pets/images/val does not exist"):
        build(yaml, "val")
    with pytest.raises(UserError, match=f"test: no image found in\n  {tmp_path}/empty"):
        build(yaml, "test")


def test_no_usable_image(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "x", "train/b": "y"})
    with pytest.raises(UserError, match=r"none of 2 images can be used:\n  labels/train/a\.txt:1: 1 field"):
        build(yaml)


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("/d/images/train/a.jpg", "/d/labels/train/a.txt"),
        ("/images/images/a.b.jpeg", "/images/labels/a.b.txt"),
        ("/d/train/a.jpg", "/d/train/a.txt"),
        ("/d/images.v2/images/x/a.png", "/d/images.v2/labels/x/a.txt"),
    ],
)
def test_label_path(image: str, label: str) -> None:
    assert label_path(image) == label


def test_list_file(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": BOX, "train/b": BOX, "train/c": BOX})
    lines = [
        "./images/train/c.jpg",
        "images/train/a.jpg",
        f"{root}/images/train/a.jpg",
        "./lists/../images/train/b.jpg",
    ]
    lines += ["./images/train/gone.jpg", "readme", ""]
    (root / "train.txt").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    index = build(write(yaml, f"path: {root}\ntrain: train.txt\nnames: [cat, dog]\n"))
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg", "b.jpg", "c.jpg"]
    assert index.problems == (
        f"{root}/train.txt: 'readme' is not the path of an image; skipped",
        "images/train/gone.jpg: no such file; image skipped",
    )
    assert index.notes == ("pets.yaml: train lists 1 image repeatedly; each is used once",)


def test_globs_lists_and_nested_folders(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"one/x/a": BOX, "one/b": BOX, "two/c": BOX, "two/d": BOX})
    (root / "images/one/.hidden.jpg").write_bytes(b"")
    (root / "images/one/loop").symlink_to(root / "images/one")
    yaml.write_text(f"path: {root}\ntrain: [images/one, 'images/t*/c.*']\nval: 'images/*'\nnames: [cat, dog]\n")
    assert {build(yaml).path(i).stem for i in range(len(build(yaml)))} == {"a", "b", "c"}
    assert len(build(yaml, "val")) == 4


def test_odd_file_names(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/ä b[1]": BOX, "train/猫": BOX})
    strange = os.fsdecode(b"\xff.jpg")
    (tmp_path / "pets/images/train/猫.jpg").rename(tmp_path / "pets/images/train" / strange)
    index = build(yaml)
    assert {index.path(i).name for i in range(2)} == {"ä b[1].jpg", strange}
    assert all(index.path(i).exists() for i in range(2))
    assert same(index, build(yaml))


def test_real_dataset(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATASETS", str(shared))
    index = build("coco128")
    assert (len(index), len(index.classes)) == (128, 929)
    assert [line.partition(": ")[2] for line in index.problems] == [
        "2 label files without an image, objects not used: 000000000656.txt, 000000000659.txt"
    ]
    assert sum(len(index.labels(i)[0]) == 0 for i in range(128)) == 2
    for i in range(0, 128, 16):
        path = index.path(i)
        assert tuple(index.sizes_hw[i]) == image_size(str(path), path.stat().st_size)
        label = Path(label_path(str(path)))
        rows = np.loadtxt(label, ndmin=2) if label.exists() else np.zeros((0, 5))
        height, width = index.sizes_hw[i]
        centres, sizes = rows[:, 1:3] * (width, height), rows[:, 3:] * (width, height)
        np.testing.assert_allclose(index.labels(i)[1], np.hstack((centres - sizes / 2, centres + sizes / 2)), atol=1e-4)
