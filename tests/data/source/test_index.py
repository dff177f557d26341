"""The dataset index: contents and refusals; stated image sizes; location of labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.analysis.error_analysis import ImageLabels, locate_labels
from tessera.data.labels.label_files import label_path
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.decode import decoded_size
from tessera.data.source.index import problem_report
from tessera.utils.errors import UserError
from tests.data.labels.test_voc import voc, voc_object, write_voc
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, coco_set, write


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


@pytest.mark.parametrize("entry", ["labels/val", "labels/val/*.txt", "labels"])
def test_label_files_in_the_place_of_images(tmp_path: Path, entry: str) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": BOX, "val/b": BOX})
    head, images = yaml.read_text().partition("val:")[0], tmp_path / "pets" / entry.replace("labels", "images")
    expected = f"label files are there; give {str(images).removesuffix('/*.txt')}, whose images find them"
    with pytest.raises(UserError, match=f"no image found in\n  .*{entry}".replace("*.txt", ".*") + f": {expected}"):
        build(write(yaml, f"{head}val: '{entry}'\nnames: [cat, dog]\n"), "val")
    index = build(write(yaml, f"{head}val: [images/val, '{entry}']\nnames: [cat, dog]\n"), "val")
    assert index.problems[-1] == f"val: no image found in {entry}: {expected}" and len(index) == 1


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
    lines += ["./images/train/gone.jpg", "readme", "", *["images/train/a.jpg"] * 2]
    (root / "train.txt").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    index = build(write(yaml, f"path: {root}\ntrain: train.txt\nnames: [cat, dog]\n"))
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg", "b.jpg", "c.jpg"]
    assert index.problems == (
        f"{root}/train.txt: 'readme' is not the path of an image; skipped",
        "images/train/gone.jpg: no such file; image skipped",
    )
    assert index.notes == (
        "pets.yaml: train lists 1 image repeatedly (3 further times); each is used once. To show rare classes more "
        "often, give --sampling balanced or --image-weights",
    )


def test_globs_lists_and_nested_folders(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"one/x/a": BOX, "one/b": BOX, "two/c": BOX, "two/d": BOX})
    (root / "images/one/.hidden.jpg").write_bytes(b"")
    (root / "images/one/loop").symlink_to(root / "images/one")
    yaml.write_text(f"path: {root}\ntrain: [images/one, 'images/t*/c.*']\nval: 'images/*'\nnames: [cat, dog]\n")
    assert {build(yaml).path(i).stem for i in range(len(build(yaml)))} == {"a", "b", "c"}
    assert len(build(yaml, "val")) == 4


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
        assert tuple(index.sizes_hw[i]) == decoded_size(str(path), path.stat().st_size)
        label = Path(label_path(str(path)))
        rows = np.loadtxt(label, ndmin=2) if label.exists() else np.zeros((0, 5))
        height, width = index.sizes_hw[i]
        centres, sizes = rows[:, 1:3] * (width, height), rows[:, 3:] * (width, height)
        np.testing.assert_allclose(index.labels(i)[1], np.hstack((centres - sizes / 2, centres + sizes / 2)), atol=1e-4)


WIDE, HIGH = (10, 5, 50, 25), (10, 5, 25, 50)  # corners in pixels
SHOWN = "its boxes fit the displayed image and are used"
TURNED = "after applying its EXIF orientation"


@pytest.mark.parametrize("form", ["coco", "voc"])
@pytest.mark.parametrize(
    "case",
    [
        ((64, 40), 1, WIDE, True, ""),
        ((65, 39), 1, WIDE, True, "made for 65 x 39 pixels, but the image has 64 x 40, which is off by one"),
        ((40, 64), 1, WIDE, True, f"width and height are swapped; {SHOWN}"),
        ((40, 64), 1, HIGH, False, "but the image has 64 x 40: width and height are swapped"),
        ((32, 20), 1, WIDE, False, "made for 32 x 20 pixels, but the image has 64 x 40"),
        ((40, 64), 6, HIGH, True, ""),
        ((64, 40), 6, WIDE, False, TURNED),
        ((64, 40), 6, HIGH, True, f"{TURNED}; {SHOWN}"),
        ((64, 40), 6, (10, 5, 25, 25), False, TURNED),
    ],
)
def test_stated_size(tmp_path: Path, form: str, case: tuple[tuple[int, int], int, tuple[int, ...], bool, str]) -> None:
    (width, height), orientation, (left, top, right, bottom), is_used, said = case
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "images").mkdir()
    for name, turned in (("a.jpg", exif), ("b.jpg", Image.Exif())):
        Image.new("RGB", (64, 40)).save(tmp_path / "images" / name, exif=turned)
    if form == "coco":
        boxes = {"a.jpg": [left, top, right - left, bottom - top], "b.jpg": [1, 2, 3, 4]}
        yaml = coco_set(tmp_path, {name: [{"category_id": 1, "bbox": box}] for name, box in boxes.items()}, {1: "cat"})
        content = json.loads((tmp_path / "set.json").read_text())
        content["images"][0] |= {"width": width, "height": height}
        write(tmp_path / "set.json", json.dumps(content))
    else:
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        for name, stated, box in (("a", size, f"{left + 1} {top + 1} {right} {bottom}"), ("b", "", "2 3 4 6")):
            (tmp_path / f"images/{name}.xml").write_bytes(voc(voc_object(box=box), size=stated))
        yaml = write(tmp_path / "a.yaml", f"path: {tmp_path}\ntrain: images\nnames: [cat]\n")
    index = build(yaml)
    assert [[left, top, right, bottom]] * is_used + [[1, 2, 4, 6]] == index.boxes_xyxy.round(3).tolist()
    assert len(index.problems) == bool(said) and all(said in line for line in index.problems), index.problems
    assert all(line.endswith("image skipped") != is_used for line in index.problems)


# Objects are in lines 2, 4 and 6: a blank line, an ignored region, a duplicate and a polygon are among them.
TEXT = "\n0 0.5 0.5 0.5 0.5\n-1 0.25 0.5 0.5 1\n1 0.5 0.5 0.25 0.25\n0 0.5 0.5 0.5 0.5\n1 0.5 0 1 0 1 1\n"


def labels(yaml: Path, split: str = "train", **options: bool) -> list[ImageLabels]:
    index = build(yaml, split, **options)
    found = locate_labels(load_spec(yaml), index, range(len(index)), **options)
    return [found[image] for image in range(len(index))]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": TEXT, "train/b": "0 0.5 0.5 0.5 0.5\n1 0.5 0.5 0.2 0.2\n"})
    a, b = labels(yaml)
    assert Path(a.file) == tmp_path / "pets" / "labels" / "train" / "a.txt"
    assert [a.place(row) for row in range(3)] == [(2, None), (4, None), (6, None)] and list(b.lines) == [1, 2]
    assert a.place(-1) == (None, None)
    assert [list(one.lines) for one in labels(yaml, single_cls=True)] == [[2, 4, 6], [1, 2]]


def test_a_file_that_has_changed_has_no_lines(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 0.5 0.5\n", "train/b": "0 0.5 0.5 0.5 0.5\n"})
    index = build(yaml)
    folder = tmp_path / "pets" / "labels" / "train"
    (folder / "a.txt").write_text("0 0.5 0.5 0.5 0.4\n")
    (tmp_path / "pets" / "images" / "train" / "b.jpg").unlink()
    found = locate_labels(load_spec(yaml), index, [0, 1])
    assert found[0].place(0) == (None, None) and found[0].file == str(folder / "a.txt")
    assert 1 not in found


def test_lines_of_voc_are_those_of_the_objects(tmp_path: Path) -> None:
    objects = voc_object("cat"), voc_object("dog", extra="<difficult>1</difficult>"), voc_object("dog")
    write_voc(tmp_path, "a", *objects)
    yaml = tmp_path / "a.yaml"
    yaml.write_text("train: JPEGImages\nval: JPEGImages\nnames: [cat, dog]\n")
    (found,) = labels(yaml)
    text = Path(found.file).read_text().splitlines()
    assert found.file.endswith("a.xml") and len(found.lines) == 2
    assert [text[line - 1] for line in found.lines] == [objects[0], objects[2]]


def test_ids_of_a_coco_file(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    rows = [{"id": 7, "iscrowd": 1}, {"id": 40}, {}]
    records = [{"category_id": 3, "bbox": [4, 4, 9, n + 5], **row} for n, row in enumerate(rows)]
    (found,) = labels(coco_set(tmp_path, {"a.jpg": records}, {3: "cat"}), "val")
    assert found.file == str(tmp_path / "set.json")
    assert [found.place(row) for row in range(2)] == [(None, 40), (None, None)]
