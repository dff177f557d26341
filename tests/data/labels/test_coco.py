"""COCO files: boxes, ids, names, segmentations, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as oracle

from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.labels.coco import mask_box, parse_coco, read_category_names, read_coco
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


ADDRESS = "http://x/y.jpg"
TWO_CATS = coco(
    categories=[{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}, {"id": 30, "name": "cat"}],
    annotations=[{"image_id": 7, "category_id": own, "bbox": [1, 2, 3, 4]} for own in (17, 30)],
)


def with_first(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The same with one more image, before the others."""
    return {**content, "images": [{"id": 1, "file_name": name}, *content["images"]]}


@pytest.mark.parametrize("place", ["absolute", "../../stray.txt", "../../../stray.txt", ADDRESS, "nowhere.jpg"])
def test_a_stray_path_costs_only_itself(tmp_path: Path, place: str) -> None:
    for folder in (tmp_path, tmp_path / "set"):
        folder.mkdir(exist_ok=True)
        (folder / "stray.txt").write_text("no picture")
    name = str(tmp_path / "stray.txt") if place == "absolute" else place
    index = build(write_coco(tmp_path / "set", with_first(name, coco())))
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg", "b.jpg"]
    (problem,) = index.problems
    assert problem.endswith("; image skipped")
    assert ("it is an address, expected a file" in problem) == (place == ADDRESS)


def test_of_two_files_the_one_below_the_folder_decides(tmp_path: Path) -> None:
    (tmp_path / "stray.txt").write_text("no picture")
    content = with_first("../../stray.txt", coco())
    content["images"].pop()
    content["annotations"] = content["annotations"][:1]
    assert len(build(write_coco(tmp_path / "set", content))) == 1


def test_annotations_of_no_image_are_all_told_by_the_check(tmp_path: Path) -> None:
    """A run refuses them; the check continues, and reports what else is wrong."""
    stray = [{"image_id": own, "category_id": 17, "bbox": [1, 2, 3, 4]} for own in (5, "7", None)]
    outside = {"image_id": 7, "category_id": 17, "bbox": [900, 2, 3, 4]}
    spec = load_spec(write_coco(tmp_path / "set", coco(annotations=[*stray, outside, *coco()["annotations"]])))
    with pytest.raises(UserError) as caught:
        build_index(spec, "train")
    check = check_dataset(spec)
    places = [line.partition("annotations[")[2] for line in check.errors if "annotations[" in line]
    assert [place.partition("]")[0] for place in places] == ["0", "1", "2"]
    assert str(caught.value).splitlines() == [line for line in check.errors if "annotations[" in line]
    assert "has image_id null" in places[2] and any("lies outside the image" in line for line in check.problems)


def test_images_alone_are_a_test_split(tmp_path: Path) -> None:
    """COCO's own test images come with such a file; results are written with its ids."""
    content = {key: value for key, value in coco().items() if key != "annotations"}
    yaml = write_coco(tmp_path / "set", content)
    index = build(write(yaml, yaml.read_text().replace("train: ", "test: ")), "test")
    ids = index.coco_ids()
    assert len(index) == 2 and ids is not None and ids.images == (7, 9)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", r"instances_train\.json:1: not valid JSON"),
        *(
            ({key: value for key, value in coco().items() if key != missing}, f"found no key '{missing}', expected")
            for missing in ("annotations", "images", "categories")
        ),
        (TWO_CATS, "the categories with the ids 17 and 30 are both named 'cat', expected a name for each"),
        (
            coco(images=[{"id": "7", "file_name": "a.jpg"}]),
            r"annotations\[0\] has image_id 7, but no image has that id",
        ),
        (coco(annotations=[{"image_id": "9"}]), r"annotations\[0\] has image_id '9', but no image has that id"),
        ("[]", "expected a COCO detection file"),
        (coco(images=coco()["images"][:1]), "has image_id 9, but no image has that id"),
        (coco(images=[], annotations=[]), "lists no images"),
        (coco(annotations=[3]), r"annotations\[0\] is 3, expected an object"),
        (coco(annotations=None), "annotations is null, expected a list"),
        (coco(images=[{"id": 1}]), r"images\[0\] has the file_name null"),
        (coco(categories=[{"id": 1}]), r"categories\[0\] has no 'name', expected a COCO file"),
        (coco(images=[{"id": 1, "file_name": ["a"] * 200}]), r"images\[0\] has the file_name .{9,80}, which no file"),
        (coco(images=coco()["images"] + [{"id": 7, "file_name": "c.jpg"}]), r"images\[2\] has the id 7, and so has an"),
        (coco(categories=coco()["categories"] * 2), r"categories\[2\] has the id 17, and so has an"),
        (coco(images=coco()["images"] + [{"id": 8, "file_name": "x/../a.jpg"}]), r"has images\[0\] \('a.jpg'\)"),
        ('{"images": [' + "9" * 6000 + "]}", "expected a COCO JSON .*4300 digits"),
        ('{"images": ' + "[" * 100_000 + "]" * 100_000 + "}", "expected a COCO JSON .*recursion"),
        (coco(images=[{"id": float("inf"), "file_name": "a.jpg"}]), r"images\[0\] has the id inf, expected an integer"),
        (coco(images=[{"id": 7, "file_name": "a\0.jpg"}]), r"file_name 'a\\x00.jpg', which no file can have"),
        (coco(images=[{"id": 7, "file_name": "a" * 300 + ".jpg"}]), r"such as 'a+.*a+\.jpg', are in none of"),
        (coco(images=[{"id": 7, "file_name": "a.jpg", "width": 10**400}]), "width a number of about 401 digits"),
    ],
)
def test_not_coco(tmp_path: Path, content: Any, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        build(write_coco(tmp_path / "set", content))
    assert "instances_train.json" in str(caught.value) and ".txt" not in str(caught.value)


def test_coco_images_nowhere(tmp_path: Path) -> None:
    write_coco(tmp_path / "set", with_first(ADDRESS, coco()))
    found = read_coco(tmp_path / "set/annotations/instances_train.json", [tmp_path / "x", tmp_path / "y"])
    assert f"such as 'a.jpg', are in none of\n  {tmp_path}/x\n  {tmp_path}/y" in found.all_missing


POLYGON = st.lists(st.floats(-12, 60, width=32), min_size=6, max_size=24).map(lambda xy: xy[: len(xy) // 2 * 2])
SIZE = st.tuples(st.integers(1, 50), st.integers(1, 50))


def expected(rle: Any) -> list[float] | None:
    """The oracle's box as corners."""
    x, y, width, height = oracle.toBbox(rle).tolist()
    return [x, y, x + width, y + height] if width and height else None


def found(segmentation: Any, size_hw: tuple[int, int]) -> list[float] | None:
    box = mask_box(segmentation, size_hw)
    return None if box is None else list(box)


@settings(max_examples=300)
@given(st.lists(POLYGON, min_size=1, max_size=3), SIZE)
def test_polygons(parts: list[list[float]], size_hw: tuple[int, int]) -> None:
    assert found(parts, size_hw) == expected(oracle.merge(oracle.frPyObjects(parts, *size_hw)))


@given(SIZE, st.integers(0, 1000), st.floats(0, 1))
def test_run_lengths(size_hw: tuple[int, int], seed: int, filled: float) -> None:
    mask = np.asfortranarray(np.random.default_rng(seed).random(size_hw) < filled, np.uint8)
    rle = oracle.encode(mask)
    pixels = mask.flatten(order="F")
    ends = [*(np.flatnonzero(np.diff(pixels)) + 1).tolist(), len(pixels)]
    counts = np.diff([0, *([0] if pixels[0] else []), *ends]).tolist()
    for form in (rle["counts"].decode(), counts):
        assert found({"size": [*size_hw], "counts": form}, size_hw) == expected(rle)


@pytest.mark.parametrize(
    "segmentation",
    [
        None, 3, "x", [], {}, [[]], [[1, 2, 3]], [[1, 1, 1, 1, 1, 1]], [[1e308, 0, 0, 0, 0, 9]],
        {"size": [8, 8], "counts": [64]}, {"size": [8, 8], "counts": [-1, 65]}, {"size": [8, 8], "counts": [1, 2]},
        {"size": [10, 8], "counts": [1, 79]}, {"size": [8, 8], "counts": "é" * 99}, {"size": 8, "counts": []},
        {"size": [8, 8], "counts": "o" * 9_999_999}, {"counts": None}, {"size": [8, 8], "counts": [0.5, 63.5]},
        [[(-1) ** place * 6e4 if place % 2 else place for place in range(40_000)]],
    ],
)  # fmt: skip
def test_no_mask_of_this_image(segmentation: Any) -> None:
    assert mask_box(segmentation, (8, 8)) is None


def test_run_lengths_of_a_size_that_is_off_by_one() -> None:
    """They are decoded by their own; the box is cut to the image elsewhere."""
    assert mask_box({"size": [8, 9], "counts": [8, 3, 61]}, (8, 8)) == (1, 0, 2, 3)
    assert mask_box({"size": [9, 8], "counts": [0, 72]}, (8, 8)) == (0, 0, 8, 9)
    assert mask_box({"size": [0, 5], "counts": []}, (1, 5)) is None
