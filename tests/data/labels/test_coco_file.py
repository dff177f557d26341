"""COCO JSON: labels, crowds, ids and class names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.data.labels.coco import parse_coco, read_category_names
from tessera.data.source import dataset_yaml as spec_module
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.errors import UserError
from tessera.utils.types import CocoIds
from tests.data.make import write_image
from tests.data.source.made_yaml import build, write

IDS = {"cat": 0, "dog": 1}


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


def test_coco_second_start_does_not_read_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_coco(tmp_path / "set", coco())
    first = build(yaml)
    with monkeypatch.context() as patch:
        patch.setattr("tessera.data.source.split_files.read_coco", lambda *_: pytest.fail("read again"))
        assert build(yaml).digest == first.digest
    write_image(tmp_path / "set/images/train/a.jpg", (48, 64), seed=9)
    assert build(yaml).digest != first.digest
    write_coco(tmp_path / "set", coco(annotations=coco()["annotations"][:1]))
    assert len(build(yaml).classes) == 1


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


def test_a_box_of_zeros_is_that_of_the_segmentation() -> None:
    record = {"category_id": 1, "bbox": [0, 0, 0, 0], "segmentation": [[16, 12, 32, 12, 32, 24, 16, 24]]}
    assert parse_coco([(0, record)], (48, 64), {1: "cat"}, IDS).boxes == [24 / 64, 18 / 48, 16 / 64, 12 / 48]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"category_id": 1}, "there is no bbox, expected"),
        ({"category_id": 1, "bbox": None, "segmentation": []}, "bbox is null, expected"),
        ({"category_id": 1, "bbox": [1, 2, 0, 4]}, "bbox is [1, 2, 0, 4], expected x, y, width, height"),
        ({"category_id": 1, "bbox": [64, 2, 9, 4]}, "outside the image"),
        ({"category_id": 1, "bbox": [0, 0, 0, 0.0], "segmentation": "x"}, "0.0], and the segmentation is 'x'"),
        ({"category_id": 1, "bbox": [1, 2, 3]}, "bbox is [1, 2, 3]"),
        ({"category_id": 1, "bbox": [1, 2, -3, 4]}, "expected x, y, width, height"),
        ({"category_id": 1, "bbox": [1, 2, float("nan"), 4]}, "expected x, y"),
        ({"category_id": 1, "bbox": [1, 2, 10**400, 4]}, "expected x, y"),
        ({"category_id": 1, "bbox": [], "segmentation": [[99, 99, 98, 99, 98, 98]]}, "expected polygons"),
        ({"category_id": 1, "segmentation": {"size": [48, 64], "counts": [3072]}}, "there is no bbox, and the segm"),
        ({"category_id": 1, "bbox": [100, 2, 3, 4]}, "outside the image"),
    ],
)
def test_coco_problems(record: dict[str, Any], what: str) -> None:
    ((number, found),) = parse_coco([(3, record)], (48, 64), {1: "cat"}, IDS).problems
    assert number == 3 and what in found


def test_a_wrong_annotation_does_not_cost_the_others(tmp_path: Path) -> None:
    content = coco()
    content["annotations"] += [{"image_id": 7, "category_id": 17, "bbox": box} for box in ([], [1, 2], [99, 0, 5, 5])]
    index = build(write_coco(tmp_path / "set", content))
    assert index.classes.tolist() == [1, 0] and len(index) == 2 and len(index.problems) == 3
    assert all(f"annotations[{3 + n}]" in line for n, line in enumerate(index.problems))
    assert all(line.endswith("object skipped") for line in index.problems)


def test_coco_unknown_category_is_an_error(tmp_path: Path) -> None:
    yaml = write_coco(tmp_path / "set", coco(categories=[{"id": 17, "name": "cat"}, {"id": 18, "name": "cow"}]))
    with pytest.raises(UserError, match=r"annotations\[0\]: class 'cow', but coco\.yaml names 2 classes"):
        build(yaml)
    single = build(yaml, "train", single_cls=True)
    assert (single.classes.tolist(), single.names) == ([0, 0], ("item",))


def test_crowds_are_kept_apart(tmp_path: Path) -> None:
    content = coco()
    yaml = write_coco(tmp_path / "set", coco(annotations=content["annotations"][:2]))
    without = build(yaml)
    assert len(without.ignored_offsets) == 0 and [len(part) for part in without.ignored(1)] == [0, 0]
    index = build(write_coco(tmp_path / "set", content))
    assert index.classes.tolist() == [1, 0] and not index.problems
    assert [len(part) for part in index.ignored(0)] == [0, 0]
    classes, boxes_xyxy = index.ignored(1)
    assert classes.tolist() == [0]
    np.testing.assert_allclose(boxes_xyxy, [[1, 1, 6, 6]], atol=1e-5)
    assert index.content_hash() != without.content_hash(), "they are trained as no background"
    again = build(tmp_path / "coco.yaml")
    np.testing.assert_array_equal(again.ignored(1)[1], boxes_xyxy)
    assert again.coco_ids() == index.coco_ids()


def test_ids_of_the_file(tmp_path: Path) -> None:
    spec = load_spec(write_coco(tmp_path / "set", coco()))
    assert build_index(spec, "train").coco_ids() == CocoIds((7, 9), (17, 18))
    assert build_index(spec, "train", single_cls=True).coco_ids() == CocoIds((7, 9), (17,))
    text = json.dumps(coco()).replace("7", '"seven"').replace('1"seven"', "17")
    assert build(write_coco(tmp_path / "set", text)).coco_ids() == CocoIds(("seven", 9), (17, 18))
    (tmp_path / "coco.yaml").write_text(
        f"path: {tmp_path / 'set'}\ntrain: images/train\nval: images/train\nnames: [cat, dog]\n"
    )
    assert build(tmp_path / "coco.yaml", "val").coco_ids() is None


def test_files_whose_ids_meet(tmp_path: Path) -> None:
    write_coco(tmp_path / "set", coco())
    other = coco()
    for image, name in zip(other["images"], ("c.jpg", "d.jpg"), strict=True):
        write_image(tmp_path / "set/images/train" / name)
        image["file_name"] = name
    (tmp_path / "set" / "train.json").write_text(json.dumps(other))
    yaml = tmp_path / "two.yaml"
    yaml.write_text(
        f"path: {tmp_path / 'set'}\ntrain: [annotations/instances_train.json, train.json]\nnames: [cat, dog]\n"
    )
    index = build(yaml)
    assert len(index) == 4 and index.coco_ids() is None
    assert "ids of images or categories collide" in index.notes[0]


def test_names_come_from_the_json_where_the_yaml_has_none(tmp_path: Path) -> None:
    root_twice = [
        {"id": 0, "name": "dog", "supercategory": "none"},
        {"id": 18, "name": "dog"},
        {"id": 17, "name": "cat"},
    ]
    yaml = write_coco(tmp_path / "set", coco(categories=root_twice))
    (tmp_path / "set/val.json").write_text(json.dumps(coco(categories=root_twice[1:])))
    spec = load_spec(write(yaml, yaml.read_text().replace("names: [cat, dog]", "val: val.json")))
    assert spec.names == ("cat", "dog"), "by their ids; a root that no object is of is none"
    assert build_index(spec, "train").classes.tolist() == [1, 0]
    (tmp_path / "set/val.json").write_text(json.dumps(coco(categories=[{"id": 17, "name": "cow"}], annotations=[])))
    with pytest.raises(
        UserError, match=r"the categories of .*train\.json and .*val\.json differ \('cat', 'cow', 'dog'\)"
    ):
        load_spec(yaml)
    yaml.write_text(yaml.read_text() + "nc: 3\n")
    (tmp_path / "set/val.json").unlink()
    yaml.write_text(yaml.read_text().replace("val: val.json", ""))
    with pytest.raises(UserError, match="nc is 3, but names has 2 classes"):
        load_spec(yaml)
    assert read_category_names(tmp_path / "set/annotations/instances_train.json") == ["cat", "dog"]


def test_names_of_an_unchanged_file_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        spec_module, "read_category_names", lambda path: (read.append(path.name), read_category_names(path))[1]
    )
    yaml = write_coco(tmp_path / "set", coco())
    yaml.write_text(yaml.read_text().replace("names: [cat, dog]", ""))
    assert [load_spec(yaml).names for _ in range(3)] == [("cat", "dog")] * 3 and len(read) == 1
    file = tmp_path / "set/annotations/instances_train.json"
    file.write_text(file.read_text().replace('"cat"', '"puma"'))
    assert load_spec(yaml).names == ("puma", "dog") and len(read) == 2


def test_names_of_all_files_that_a_glob_matches(tmp_path: Path) -> None:
    yaml = write_coco(tmp_path / "set", coco())
    yaml.write_text(f"path: {tmp_path / 'set'}\ntrain: annotations/instances_*.json\n")
    assert load_spec(yaml).names == ("cat", "dog") and len(build(yaml)) == 2
    yaml.write_text(f"path: {tmp_path / 'set'}\ntrain: annotations/none_*.json\n")
    with pytest.raises(UserError, match=r"none_\*\.json"):
        load_spec(yaml)
