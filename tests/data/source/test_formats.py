"""Pascal VOC XML and COCO JSON, read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.source.formats import parse_coco, parse_voc, read_coco
from data.source.index import build_index
from data.source.spec import load_spec
from tests.data.make import write_image
from utils.errors import UserError

IDS = {"cat": 0, "dog": 1}


def voc(*objects: str, size: str = "<size><width>64</width><height>48</height><depth>3</depth></size>") -> bytes:
    return (
        "<annotation>\n<filename>x.jpg</filename>\n" + size + "\n" + "\n".join(objects) + "\n</annotation>"
    ).encode()


def voc_object(name: str = "cat", box: str = "1 1 64 48", extra: str = "") -> str:
    corners = "".join(
        f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box.split(), strict=False)
    )
    return f"<object><name>{name}</name>{extra}<bndbox>{corners}</bndbox></object>"


def write_voc(
    root: Path, stem: str, *objects: str, annotations: str = "Annotations", images: str = "JPEGImages"
) -> None:
    write_image(root / images / f"{stem}.jpg")
    (root / annotations).mkdir(parents=True, exist_ok=True)
    (root / annotations / f"{stem}.xml").write_bytes(voc(*objects))


def test_voc_counts_pixels_from_one() -> None:
    objects = parse_voc(voc(voc_object(), voc_object("dog", "17 13 32 24")), (48, 64), IDS)
    assert objects.classes == [0, 1]
    np.testing.assert_allclose(objects.boxes, [0.5, 0.5, 1, 1, 24 / 64, 18 / 48, 0.25, 0.25])
    assert not objects.problems


def test_voc_boxes_from_zero_are_cut() -> None:
    objects = parse_voc(voc(voc_object(box="0 0 70 50")), (48, 64), IDS)
    np.testing.assert_allclose(objects.boxes, [0.5, 0.5, 1, 1])


def test_voc_difficult_and_parts_are_passed_over() -> None:
    part = "<part><name>head</name><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>6</xmax><ymax>6</ymax></bndbox></part>"
    raw = voc(voc_object(extra="<difficult>1</difficult>"), voc_object(extra=part + "<difficult>0</difficult>"))
    objects = parse_voc(raw, (48, 64), IDS)
    assert objects.classes == [0]
    np.testing.assert_allclose(objects.boxes, [0.5, 0.5, 1, 1])


def test_voc_duplicates_count_once() -> None:
    objects = parse_voc(voc(voc_object(), voc_object(), voc_object("dog")), (48, 64), IDS)
    assert (objects.classes, objects.duplicates) == ([0, 1], 1)


def test_voc_unknown_name_has_its_line() -> None:
    assert parse_voc(voc(voc_object(), voc_object("zebra")), (48, 64), IDS).unknown == [(5, "'zebra'")]


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b"<annotation>\n<object>\n</annotation>", 3, "not valid XML"),
        (b"", 1, "not valid XML"),
        (b"<html/>", 1, "expected <annotation>"),
        (voc(voc_object(box="5 5 20")), 4, "no <ymax>"),
        (voc(voc_object(box="5 5 20 x")), 4, "<ymax> is 'x', expected a number"),
        (voc(voc_object(box="5 5 20 inf")), 4, "expected a finite number"),
        (voc(voc_object(box="20 5 5 20")), 4, "xmax or ymax is smaller"),
        (voc(voc_object(box="100 5 120 20")), 4, "outside the image"),
        (voc(size="<size><width>48</width><height>64</height></size>"), None, "made for an image of 48 x 64 pixels"),
        (b'<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>', 1, "declares entities"),
    ],
)
def test_voc_problems(raw: bytes, line: int | None, what: str) -> None:
    ((found_line, found),) = parse_voc(raw, (48, 64), IDS).problems
    assert (found_line, what in found) == (line, True), found


@settings(deadline=None)
@given(st.binary(max_size=100) | st.text(alphabet="<>/objectanibdx &;", max_size=60).map(str.encode))
def test_voc_any_bytes_are_read(raw: bytes) -> None:
    assert parse_voc(raw, (48, 64), IDS).classes == []


def test_voc_folder(tmp_path: Path) -> None:
    root = tmp_path / "voc"
    write_voc(root, "a", voc_object("dog", "17 13 32 24"))
    write_voc(root, "b")
    (root / "Annotations" / "lost.xml").write_bytes(voc())
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nnames: [cat, dog]\n")
    index = build_index(load_spec(tmp_path / "voc.yaml"), "train")
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg", "b.jpg"]
    np.testing.assert_array_equal(index.labels(0)[1], [[16, 12, 32, 24]])
    (problem,) = index.problems
    assert "lost.xml: no image of that name" in problem


def test_voc_beside_the_images(tmp_path: Path) -> None:
    write_voc(tmp_path / "voc", "a", voc_object(), annotations="train", images="train")
    write_image(tmp_path / "voc" / "train" / "background.jpg")
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: train\nnames: [cat, dog]\n")
    index = build_index(load_spec(tmp_path / "voc.yaml"), "train")
    assert (len(index), len(index.classes), index.problems) == (2, 1, ())


def test_voc_image_sets(tmp_path: Path) -> None:
    kit = tmp_path / "voc" / "VOCdevkit" / "VOC2007"
    for stem in ("000001", "000002", "000003"):
        write_voc(kit, stem, voc_object())
    (kit / "ImageSets" / "Main").mkdir(parents=True)
    (kit / "ImageSets" / "Main" / "trainval.txt").write_text("000001\n000003\n")
    entry = "VOCdevkit/VOC2007/ImageSets/Main/trainval.txt"
    (tmp_path / "voc.yaml").write_text(f"path: voc\ntrain: {entry}\nnames: [cat, dog]\n")
    index = build_index(load_spec(tmp_path / "voc.yaml"), "train")
    assert [index.path(i).name for i in range(len(index))] == ["000001.jpg", "000003.jpg"]
    assert index.classes.tolist() == [0, 0]


def test_voc_unknown_name_is_an_error(tmp_path: Path) -> None:
    write_voc(tmp_path / "voc", "a", voc_object("zebra"))
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nnames: [cat, dog]\n")
    spec = load_spec(tmp_path / "voc.yaml")
    with pytest.raises(UserError, match=r"Annotations/a\.xml:4: class 'zebra', but voc\.yaml names 2 classes"):
        build_index(spec, "train")
    assert build_index(spec, "train", single_cls=True).classes.tolist() == [0]


def coco(**changes: Any) -> dict[str, Any]:
    content = {
        "images": [{"id": 7, "file_name": "a.jpg", "width": 64, "height": 48}, {"id": 9, "file_name": "b.jpg"}],
        "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {"image_id": 7, "category_id": 18, "bbox": [16, 12, 16, 12], "iscrowd": 0},
            {"image_id": 9, "category_id": 17, "bbox": [0, 0, 64.3, 48]},
            {"image_id": 9, "category_id": 17, "bbox": [1, 1, 5, 5], "iscrowd": 1},
        ],
    }
    return {**content, **changes}


def write_coco(
    root: Path, content: Any, json_path: str = "annotations/instances_train.json", images: str = "images/train"
) -> Path:
    for name in ("a.jpg", "b.jpg"):
        write_image(root / images / name)
    path = root / json_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    yaml = root.parent / "coco.yaml"
    yaml.write_text(f"path: {root}\ntrain: {json_path}\nnames: [cat, dog]\n")
    return yaml


@pytest.mark.parametrize(
    ("json_path", "images"),
    [
        ("annotations/instances_train2017.json", "images/train2017"),
        ("annotations/instances_train2017.json", "train2017"),
        ("train/_annotations.coco.json", "train"),
        ("labels.json", "images"),
        ("labels.json", "."),
    ],
)
def test_coco_layouts(tmp_path: Path, json_path: str, images: str) -> None:
    index = build_index(load_spec(write_coco(tmp_path / "set", coco(), json_path, images)), "train")
    assert [index.path(i).name for i in range(2)] == ["a.jpg", "b.jpg"]
    assert index.classes.tolist() == [1, 0]
    np.testing.assert_array_equal(index.boxes_xyxy, [[16, 12, 32, 24], [0, 0, 64, 48]])
    assert not index.problems and len(index.segment_offsets) == 0


def test_coco_second_start_does_not_read_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_coco(tmp_path / "set", coco())
    first = build_index(load_spec(yaml), "train")
    with monkeypatch.context() as patch:
        patch.setattr("data.source.listing.read_coco", lambda *_: pytest.fail("read again"))
        assert build_index(load_spec(yaml), "train").digest == first.digest
    write_image(tmp_path / "set/images/train/a.jpg", (48, 64), seed=9)
    assert build_index(load_spec(yaml), "train").digest != first.digest
    write_coco(tmp_path / "set", coco(annotations=coco()["annotations"][:1]))
    assert len(build_index(load_spec(yaml), "train").classes) == 1


def test_coco_polygons() -> None:
    square = [16, 12, 32, 12, 32, 24, 16, 24]
    records = [
        {"category_id": 1, "bbox": [16, 12, 16, 12], "segmentation": [square]},
        {"category_id": 1, "bbox": [0, 0, 8, 8], "segmentation": [[0, 0, 1, 0, 1, 1], [7, 7, 8, 7, 8, 8]]},
        {"category_id": 1, "bbox": [0, 0, 9, 9], "segmentation": {"counts": "abc", "size": [48, 64]}},
    ]
    objects = parse_coco(list(enumerate(records)), (48, 64), {1: "cat"}, IDS)
    assert [len(polygon) for polygon in objects.polygons] == [4, 6, 0]
    np.testing.assert_allclose(objects.polygons[0] * (64, 48), np.reshape(square, (4, 2)))


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"category_id": 1}, "bbox is null"),
        ({"category_id": 1, "bbox": [1, 2, 3]}, "bbox is [1, 2, 3]"),
        ({"category_id": 1, "bbox": [1, 2, -3, 4]}, "expected x, y, width, height"),
        ({"category_id": 1, "bbox": [1, 2, float("nan"), 4]}, "expected x, y"),
        ({"category_id": 1, "bbox": [1, 2, 10**400, 4]}, "expected x, y"),
        ({"category_id": 1, "bbox": [100, 2, 3, 4]}, "outside the image"),
    ],
)
def test_coco_problems(record: dict[str, Any], what: str) -> None:
    ((number, found),) = parse_coco([(3, record)], (48, 64), {1: "cat"}, IDS).problems
    assert number == 3 and what in found


def test_coco_problem_names_annotation_and_leaves_the_image_out(tmp_path: Path) -> None:
    bad = coco()
    bad["annotations"][1]["bbox"] = [1, 2]
    index = build_index(load_spec(write_coco(tmp_path / "set", bad)), "train")
    assert [index.path(0).name, len(index)] == ["a.jpg", 1]
    assert index.problems[0].startswith("annotations/instances_train.json: annotations[1]: bbox is [1, 2]")


def test_coco_other_size_is_a_problem(tmp_path: Path) -> None:
    bad = coco()
    bad["images"][0].update(width=48, height=64)
    (problem,) = build_index(load_spec(write_coco(tmp_path / "set", bad)), "train").problems
    assert problem.startswith(
        "images/train/a.jpg (annotations/instances_train.json): the annotations are made for 48 x 64"
    )


def test_coco_unknown_category_is_an_error(tmp_path: Path) -> None:
    yaml = write_coco(tmp_path / "set", coco(categories=[{"id": 17, "name": "cat"}, {"id": 18, "name": "cow"}]))
    with pytest.raises(UserError, match=r"annotations\[0\]: class 'cow', but coco\.yaml names 2 classes"):
        build_index(load_spec(yaml), "train")
    assert build_index(load_spec(yaml), "train", single_cls=True).classes.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", r"instances_train\.json:1: not valid JSON"),
        ("[]", "expected a COCO detection file"),
        ('{"images": []}', "KeyError 'categories'"),
        (coco(images=coco()["images"][:1]), "image_id 9, but no image has that id"),
        (coco(images=[], annotations=[]), "lists no images"),
        (coco(annotations=[{"image_id": [1]}]), "no image has that id"),
        (coco(annotations=[3]), "expected a COCO detection file"),
    ],
)
def test_not_coco(tmp_path: Path, content: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        build_index(load_spec(write_coco(tmp_path / "set", content)), "train")


def test_coco_images_nowhere(tmp_path: Path) -> None:
    write_coco(tmp_path / "set", coco())
    with pytest.raises(UserError) as caught:
        read_coco(tmp_path / "set/annotations/instances_train.json", [tmp_path / "x", tmp_path / "y"])
    assert f"such as 'a.jpg', are in none of\n  {tmp_path}/x\n  {tmp_path}/y" in str(caught.value)
