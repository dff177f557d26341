"""Invalid COCO JSON: stray records are skipped, and messages name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.labels.coco import read_coco
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.errors import UserError
from tests.data.labels.test_coco_file import coco, write_coco
from tests.data.source.made_yaml import build, write

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


def test_absolute_names_alone(tmp_path: Path) -> None:
    images = [
        {"id": own, "file_name": str(tmp_path / "set/images/train" / name)}
        for own, name in ((7, "a.jpg"), (9, "b.jpg"))
    ]
    assert len(build(write_coco(tmp_path / "set", coco(images=images)))) == 2


def test_a_few_images_of_a_large_file(tmp_path: Path) -> None:
    images = [{"id": own, "file_name": f"{own}.jpg"} for own in range(1000, 1500)]
    images[321]["file_name"] = "a.jpg"
    index = build(
        write_coco(
            tmp_path / "set",
            coco(images=images, annotations=[{"image_id": 1321, "category_id": 17, "bbox": [1, 1, 5, 5]}]),
        )
    )
    assert len(index) == 1 and len(index.problems) == 499


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
