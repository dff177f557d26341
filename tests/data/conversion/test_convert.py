"""convert.py: what it says, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tessera.commands.convert import run
from tessera.data.conversion.kept import NAME
from tessera.utils.errors import ConfigError, UserError
from tests.data.conversion.test_round_trips import coco
from tests.data.make import write_dataset, write_image
from tests.data.source.annotations.test_voc import PART, voc_object, write_voc


def refused(yaml: Path, said: str, to: str = "coco", out: str = "out") -> None:
    """With one message that matches, and nothing written."""
    before = set(yaml.parent.glob("*"))
    with pytest.raises(UserError, match=said):
        run(data=str(yaml), to=to, out=str(yaml.parent / out))
    assert {*yaml.parent.glob("*")} - {*before, yaml.parent / "cache"} == set()


def test_what_a_format_has_no_place_for_is_said(tmp_path: Path) -> None:
    yaml = coco(tmp_path)
    losses = run(data=str(yaml), to="yolo", out=str(tmp_path / "yolo")).losses
    assert {what.partition(",")[0]: count for what, count in losses.items()} == {
        "crowds and difficult objects": 1,
        "masks become boxes": 2,
        "polygons of several parts become one": 1,
        "boxes are cut to the image": 2,
    }
    assert run(data=str(yaml), to="voc", out=str(tmp_path / "voc")).losses == {
        "masks become boxes": 2,
        "polygons become boxes": 2,
    }
    assert run(data=str(yaml), to="coco", out=str(tmp_path / "coco")).losses == {}
    pets = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 1 1\n", "train/b": None, "val/a": ""})
    assert run(data=str(pets), to="coco", out=str(tmp_path / "pets-coco")).losses == {
        "images without a label file become labelled ones": 1
    }


def test_boxes_below_one_pixel(tmp_path: Path) -> None:
    """VOC's are a pixel wide at least, those of the others come back as they were."""
    rows = "0 0.5 0.5 0.001 0.5\n1 0.3 0.3 0 0\n"
    pets = write_dataset(tmp_path / "pets", {"train/a": rows})
    there = run(data=str(pets), to="voc", out=str(tmp_path / "voc"))
    assert there.losses == {"boxes below one pixel become a pixel wide or high": 2}
    back = run(data=str(there.yaml), to="yolo", out=str(tmp_path / "back")).yaml
    assert (back.parent / "labels/train/a.txt").read_text() == rows


def test_polygons_with_a_part_that_is_none(tmp_path: Path) -> None:
    """The others are polygons, as the reader of COCO files has them, and a COCO file has all of it again."""
    yaml, rows = coco(tmp_path), "labels/train/sub/a.txt"
    without = run(data=str(yaml), to="yolo", out=str(tmp_path / "without")).yaml
    file = tmp_path / "instances_train.json"
    file.write_text(file.read_text().replace("[[2, 2, 10,", "[[1, 2, 3, 4], [NaN, 1, 1, 2, 2, 3], [2, 2, 10,"))
    there = run(data=str(yaml), to="yolo", out=str(tmp_path / "yolo")).yaml
    assert (there.parent / rows).read_text() == (without.parent / rows).read_text()
    back = run(data=str(there), to="coco", out=str(tmp_path / "back")).yaml
    assert "[[1, 2, 3, 4], [null, 1, 1, 2, 2, 3], [2, 2, 10," in (
        (back.parent / "annotations/instances_train.json").read_text()
    )


def test_a_row_that_somebody_has_changed_counts(tmp_path: Path) -> None:
    """What was kept for the others stays."""
    there = run(data=str(coco(tmp_path)), to="yolo", out=str(tmp_path / "yolo")).yaml
    labels = there.parent / "labels/train/sub/a.txt"
    crowd, *others = (row for row in labels.read_text().splitlines() if row.startswith("-1"))
    assert not others
    labels.write_text(labels.read_text().replace(crowd, "0 0.5 0.5 0.25 0.5"))
    back = run(data=str(there), to="coco", out=str(tmp_path / "back")).yaml
    found = json.loads((back.parent / "annotations/instances_train.json").read_text())
    boxes = [row["bbox"] for row in found["annotations"] if not row["segmentation"]]
    assert boxes == [[1.23, 4.57, 10.1, 20.03], [24, 12, 16, 24]]
    assert sum(row["segmentation"] != [] for row in found["annotations"]) == 3
    (there.parent / NAME).write_text("{}\n")
    with pytest.raises(UserError, match=rf"{NAME}:1: found '{{}}', expected a line as convert\.py writes it"):
        run(data=str(there), to="coco", out=str(tmp_path / "again"))


def test_labels_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    bad = {"train/a": "0 0.5 0.5 0.1\n", "train/b": "0 0.5 0.5 1 1\n"}
    refused(write_dataset(tmp_path / "pets", bad), r"train: what cannot be .*\n  labels/train/a\.txt:1: 4 fields")
    lost = write_dataset(tmp_path / "lost", {"train/a": "0 0.5 0.5 1 1\n"})
    (tmp_path / "lost/labels/train/gone.txt").write_text("0 0.5 0.5 1 1\n")
    (note,) = run(data=str(lost), to="coco", out=str(tmp_path / "found")).notes
    assert note == "labels/train: 1 label file of no image, so their objects are not used: gone.txt"
    unknown = write_dataset(tmp_path / "zoo", {"train/a": "7 0.5 0.5 0.1 0.1\n"})
    refused(unknown, r"labels/train/a\.txt:1: class 7, but zoo\.yaml names 2 classes")


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 1 1\n"})
    refused(yaml, r"pets: it is not empty, and nothing in it is replaced", out="pets")
    refused(yaml, r"pets\.yaml: found a file, expected a folder", out="pets.yaml")
    refused(yaml, r"new: it lies in .*, whose pictures are those of the dataset", out="pets/images/train/new")
    (tmp_path / "empty").mkdir()
    assert run(data=str(yaml), to="voc", out=str(tmp_path / "empty"), copy_images=True).images == 1
    assert not (tmp_path / "empty/JPEGImages/train/a.jpg").is_symlink()
    os.mkfifo(tmp_path / "fifo")
    refused(yaml, r"fifo/in/it: found a file, expected a folder", out="fifo/in/it")


def test_two_pictures_that_would_share_a_label_file(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png"):
        write_image(tmp_path / "images" / name)
    rows = [{"id": at, "image_id": at, "category_id": 1, "bbox": [0, 0, 8, 8 + at]} for at in (1, 2)]
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.png"}]
    content = {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "set.json").write_text(json.dumps(content))
    (tmp_path / "set.yaml").write_text("train: set.json\n")
    refused(tmp_path / "set.yaml", r"a\.jpg and .*a\.png would have one label file, .*a\.txt, but", to="yolo")
    assert run(data=str(tmp_path / "set.yaml"), to="coco", out=str(tmp_path / "coco")).objects == 2


@pytest.mark.parametrize("to", ["voc", "coco"])
def test_what_would_not_be_found_again(tmp_path: Path, to: str) -> None:
    """Names that VOC's XML has no form for, and a class with the name of a region."""
    pets = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 1 1\n"}, "[' cat', dog]")
    if to == "voc":
        refused(pets, r"class 'cat'.*classes that begin or end with a blank", to="voc")
    odd = write_dataset(tmp_path / "odd", {"train/a": "0 0.5 0.5 1 1\n"}, "['-1', dog]")
    refused(odd, r"a class is named '-1', as regions of every class are\. Rename it", to=to)


def test_files_that_differ_in_their_categories_and_parts_of_objects(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("val", 5)):
        write_image(tmp_path / split / "a.jpg")
        content: dict[str, Any] = {
            "images": [{"id": 1, "file_name": f"{split}/a.jpg"}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": number, "bbox": [0, 0, 8, 8]}],
            "categories": [{"id": number, "name": "cat"}],
        }
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    (tmp_path / "set.yaml").write_text("train: train.json\nval: val.json\n")
    assert "numbered anew" in run(data=str(tmp_path / "set.yaml"), to="coco", out=str(tmp_path / "coco")).notes[0]
    write_voc(tmp_path / "voc", "a", voc_object(extra=PART))
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nnames: [cat]\n")
    write_image(tmp_path / "voc/JPEGImages/empty.jpg")
    (tmp_path / "voc/Annotations/empty.xml").write_bytes(b"")
    (note,) = run(data=str(tmp_path / "voc.yaml"), to="coco", out=str(tmp_path / "voc-coco")).notes
    assert note.endswith("a.xml: its objects have parts (<part>), which are left out")


def test_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data: none given\. Give --data my\.yaml --to coco\|voc\|yolo --out"):
        run(to="coco", out=str(tmp_path))
    with pytest.raises(ConfigError, match=r"--to: found 'coc', expected one of coco, voc, yolo\. Did you mean 'coco'"):
        run(data="a.yaml", to="coc", out=str(tmp_path))
