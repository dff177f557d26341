"""Whole datasets in another format and back, with all that the formats do not share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.commands.convert import run
from tessera.utils.types import DatasetIndex
from tests.data.make import write_dataset, write_image
from tests.data.source.annotations.test_voc import voc_object, write_voc
from tests.data.source.built_index import build

PARTS = [[-0.5, 2, 10.3, 2, 10, 10], [30.125, 3, 49.75, 3, 40, 9]]
RLE = {"size": [48, 64], "counts": [100, 20, 2952]}
ROWS = "0 0.512345 0.5 0.1 0.3333\n-1 0.25 0.5 0.5 1\n-1 0.1 0.1 0.3 0.1 0.3 0.4\n2 0.5 0.5 0.1 0.1\n"


def coco(root: Path) -> Path:
    """Ids with gaps, a crowd, a mask, polygons, other keys, empty and rotated images, folders; names in the JSON."""
    write_image(root / "pictures" / "train" / "sub" / "a.jpg", (48, 64))
    write_image(root / "pictures" / "train" / "empty.png", (31, 57))
    write_image(root / "pictures" / "val" / "turned.png", (48, 64))
    pixels = Image.fromarray(np.zeros((48, 64, 3), np.uint8))
    exif = pixels.getexif()
    exif[0x0112] = 6
    pixels.save(root / "pictures" / "val" / "turned.jpg", exif=exif)
    (root / "pictures" / "val" / "turned.png").unlink()
    categories = [{"id": 90, "name": "dog", "supercategory": "pet"}, {"id": 7, "name": "cat"}]
    boxes = [
        {"id": 11, "category_id": 90, "bbox": [1.23, 4.57, 10.1, 20.03], "area": 77.25, "iscrowd": 0},
        {"category_id": 7, "bbox": [1.5, 2, 20, 30], "segmentation": RLE, "iscrowd": 1, "area": 20},
        {"category_id": 7, "bbox": [1.5, 2, 20, 30], "segmentation": RLE, "iscrowd": 0, "area": 20},
        {"category_id": 90, "bbox": [2, 2, 8.01, 8], "segmentation": [[2, 2, 10, 2, 10, 10]], "iscrowd": 0, "area": 31},
        {
            "category_id": 90,
            "bbox": [-0.5, 2, 50.25, 8],
            "segmentation": PARTS,
            "iscrowd": 0,
            "area": 60.5,
            "note": [1],
        },
    ]
    train = {
        "images": [
            {"id": 5, "file_name": "sub/a.jpg", "height": 48, "width": 64, "license": 3},
            {"id": "two", "file_name": "empty.png", "height": 31, "width": 57},
        ],
        "annotations": [{"id": at, "image_id": 5, **row} for at, row in enumerate(boxes, 1)],
        "categories": categories,
    }
    turned = [{"id": 1, "image_id": 1, "category_id": 7, "bbox": [1, 50.3, 2.7, 3.9], "iscrowd": 0, "area": 10.53}]
    images = [{"id": 1, "file_name": "turned.jpg", "height": 64, "width": 48}]
    for split, content in (("train", train), ("val", {**train, "images": images, "annotations": turned})):
        (root / f"instances_{split}.json").write_text(json.dumps(content))
    for split in ("train", "val"):
        shutil.move(root / "pictures" / split, root / "images" / split)
    (root / "set.yaml").write_text("train: instances_train.json\nval: instances_val.json\nignore: [dog]\n")
    return root / "set.yaml"


def content(file: Path) -> Any:
    """A COCO file by ids, without those of the annotations, which are numbered anew."""
    found = json.loads(file.read_text())
    rows = [{"segmentation": [], **row} for row in found["annotations"]]
    images = {str(row["id"]): row for row in found["images"]}
    return (
        images,
        [{k: v for k, v in row.items() if k != "id"} for row in rows],
        {c["id"]: c for c in found["categories"]},
    )


def convert(yaml: Path, *formats: str) -> Path:
    """The YAML after one conversion after the other."""
    for number, target in enumerate(formats):
        yaml = run(data=str(yaml), to=target, out=str(yaml.parent / f"{number}-{target}")).yaml
    return yaml


@pytest.mark.parametrize("between", [("yolo",), ("voc",), ("voc", "yolo"), ("yolo", "voc", "coco")])
def test_coco_there_and_back(tmp_path: Path, between: tuple[str, ...]) -> None:
    yaml = coco(tmp_path)
    back = convert(yaml, *between, "coco")
    for split in ("train", "val"):
        assert content(back.parent / "annotations" / f"instances_{split}.json") == content(
            tmp_path / f"instances_{split}.json"
        )
        assert same(build(yaml, split), build(back, split))


@pytest.mark.parametrize("between", [("coco",), ("voc",), ("coco", "voc"), ("yolo",)])
def test_label_files_there_and_back(tmp_path: Path, between: tuple[str, ...]) -> None:
    rows = {
        "train/a": ROWS,
        "train/sub/b": "1 0.1 0.1 0.9 0.1 0.9 0.95\n",
        "train/c": "",
        "val/a": "1 0.3 0.3 0.1 0.2\n",
    }
    yaml = write_dataset(tmp_path / "pets", rows)
    yaml.write_text(f"{yaml.read_text()}ignore: [unsure]\nclasses: {{pet: [cat, dog]}}\npixels: {{range: [0, 99]}}\n")
    back = convert(yaml, *between, "yolo")
    files = {str(file.relative_to(tmp_path / "pets")): file.read_text() for file in (tmp_path / "pets").rglob("*.txt")}
    assert {str(file.relative_to(back.parent)): file.read_text() for file in back.parent.rglob("*.txt")} == files
    for split in ("train", "val"):
        assert same(build(yaml, split), build(back, split))
        assert build(back, split).names == ("pet",) and build(back, split).pixels is not None
    assert (back.parent / "images/train/a.jpg").resolve() == tmp_path / "pets/images/train/a.jpg", "a link"


@pytest.mark.parametrize("between", [("coco",), ("yolo",), ("yolo", "coco")])
def test_voc_there_and_back(tmp_path: Path, between: tuple[str, ...]) -> None:
    pose = "<pose>Left & up</pose><truncated>1</truncated>"
    hard = voc_object("dog", "17.5 13 32.25 24", extra=f"{pose}<difficult>1</difficult>")
    write_voc(
        tmp_path / "voc",
        "a",
        voc_object(box="1 1 64 48", extra="<pose>Left &amp; up</pose>"),
        hard.replace(" & ", " &amp; "),
    )
    for seed, stem in enumerate("bcd", 1):
        write_voc(tmp_path / "voc", stem, voc_object(box=f"1 1 {9 + seed}.5 48"))
        write_image(tmp_path / "voc" / "JPEGImages" / f"{stem}.jpg", seed=seed)
    yaml = tmp_path / "voc.yaml"
    yaml.write_text("path: voc\ntrain: Annotations\nval: 0.5\nsplit_seed: 3\nnames: [cat, dog]\n")
    there = convert(yaml, "voc")
    back = convert(yaml, *between, "voc")
    files = [{file.name: file.read_text() for file in one.parent.rglob("*.xml")} for one in (there, back)]
    assert files[0] == files[1] and len(files[0]) == 4 and "<pose>Left &amp; up</pose><truncated>1" in files[0]["a.xml"]
    for split in ("train", "val"):
        assert same(build(yaml, split), build(back, split)), "the share is held out there too"


def same(a: DatasetIndex, b: DatasetIndex) -> bool:
    """Whether two indexes hold the same objects and regions."""
    arrays = (
        *("sizes_hw", "box_offsets", "classes", "boxes_xyxy", "segment_offsets", "segment_points"),
        *("ignored_offsets", "ignored_classes", "ignored_boxes_xyxy"),
    )
    return a.names == b.names and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
