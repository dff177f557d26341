"""Datasets as annotation tools export them; other formats are named."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tessera.utils.errors import UserError
from tests.data.source.made_yaml import build, check
from tests.data.source.tool_forms import EXPECTED, FORMS, HEIGHT, NAMES, STEMS, WIDTH, coco, images, write

Boxes = dict[str, list[tuple[int, list[int]]]]


def read(yaml: Path) -> Boxes:
    """Stem → class and rounded corners of each object."""
    index = build(yaml)
    found: Boxes = {}
    for number in range(len(index)):
        stem = next(stem for stem in STEMS if stem in index.path(number).stem)
        classes, boxes_xyxy = index.labels(number)
        assert abs(boxes_xyxy - boxes_xyxy.round()).max(initial=0) < 1e-3
        found[stem] = list(zip(classes.tolist(), boxes_xyxy.round().astype(int).tolist(), strict=True))
    return found


def yaml_of(root: Path, lines: str) -> Path:
    write(root / "data.yaml", f"{lines}names: {[*NAMES]}\n")
    return root / "data.yaml"


@pytest.mark.parametrize("name", FORMS)
def test_boxes(tmp_path: Path, name: str) -> None:
    yaml = yaml_of(tmp_path, FORMS[name](tmp_path))
    assert read(yaml) == EXPECTED
    said = build(yaml).notes
    assert (
        not build(yaml).problems and all("relocated by the end of the path" in line for line in said) and len(said) < 2
    ), said


@pytest.mark.parametrize("name", ["cvat_yolo", "absolute_coco", "windows_coco"])
@pytest.mark.parametrize("change", ["ambiguous", "missing", "another split", "taken"])
def test_images_that_are_not_found_once(tmp_path: Path, name: str, change: str) -> None:
    yaml = yaml_of(tmp_path, FORMS[name](tmp_path))
    (image,) = tmp_path.rglob("p3.jpg")
    if change == "ambiguous":
        copy = tmp_path / "copy" / image.parent.name
        copy.mkdir(parents=True)
        (copy / "p3.jpg").write_bytes(image.read_bytes())
    elif change == "missing":
        image.unlink()
    else:
        for path in (tmp_path / "train.txt", tmp_path / "a.json"):
            if path.exists():
                path.write_text(path.read_text().replace("p3.jpg", "q/p2.jpg" if change == "taken" else "val/p3.jpg"))
        if change == "another split":
            (image.parent / "train").mkdir()
            image.rename(image.parent / "train/p3.jpg")
    with pytest.raises(UserError) as caught:
        build(yaml)
    said = str(caught.value)
    assert "without a unique match for each" in said
    assert said.count("p3.jpg") >= 1 + (change == "ambiguous") or change == "taken", said


def test_a_removed_image_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    """Images of another split often have the same names."""
    yaml = yaml_of(tmp_path, FORMS["coco_itself"](tmp_path))
    images(tmp_path / "val2017")
    (tmp_path / "train2017/p0.jpg").unlink()
    assert read(yaml) == {stem: boxes for stem, boxes in EXPECTED.items() if stem != "p0"}
    for image in (tmp_path / "train2017").iterdir():
        image.unlink()
    with pytest.raises(UserError, match="are in none of"):
        build(yaml)


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("images", "images/p2.json"),  # labelme, Label Studio
        ("images", "annotations.xml"),  # CVAT
        ("train", "train/_annotations.csv"),
        ("data", "labels/detections.csv"),  # Open Images
        ("train", "train/_annotations.coco.json"),
    ],
)
def test_annotations_in_other_formats_are_named(tmp_path: Path, folder: str, file: str) -> None:
    images(tmp_path / folder)
    write(tmp_path / file, "{}")
    entry = rf" \(`train: {file}`\)\." if file.endswith(".json") else r"\."
    with pytest.raises(UserError, match=rf"(?s)no labels found .* {tmp_path / file} is not read as .*entry{entry}"):
        build(yaml_of(tmp_path, f"train: {folder}\n"))


def fractions(corners: list[int], side: float) -> dict[str, Any]:
    left, top, right, bottom = (corner * side for corner in corners)
    return {"bbox": [left / WIDTH, top / HEIGHT, (right - left) / WIDTH, (bottom - top) / HEIGHT]}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (coco(annotation=partial(fractions, side=1)), r"all boxes \(7\) lie in the first pixel of their images"),
        (coco(annotation=partial(fractions, side=1.0000005)), r"all boxes \(7\) lie in the first pixel"),
        ({**coco(), "annotations": []}, r"a\.json: its annotations hold no object"),
        (coco(annotation=lambda _: {"iscrowd": 1}), r"a\.json: its annotations hold 7 crowds \(iscrowd\)"),
    ],
)
def test_coco_that_nothing_is_learnt_from(tmp_path: Path, content: Any, what: str) -> None:
    images(tmp_path / "images")
    write(tmp_path / "a.json", content)
    write(tmp_path / "data.yaml", "train: a.json\nval: a.json\nnames: [cat, dog]\n")
    with pytest.raises(UserError, match=what):
        build(tmp_path / "data.yaml")
    assert any(re.search(what, line) for line in check(tmp_path / "data.yaml").errors)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"bbox": [1, 2, 3]}, r"annotations\[0\]: bbox is \[1, 2, 3\], expected x, y, width, height in pixels"),
        ({"bbox": None, "segmentation": {"size": [64, 96], "counts": [6144]}}, r"annotations\[0\]: bbox is null"),
    ],
)
def test_annotations_that_are_all_refused_are_not_called_missing(tmp_path: Path, change: Any, what: str) -> None:
    images(tmp_path / "images")
    write(tmp_path / "a.json", coco(annotation=lambda _: change))
    with pytest.raises(UserError, match=rf"7 annotations for 6 images, none usable:\n  a\.json: {what}"):
        build(yaml_of(tmp_path, "train: a.json\n"))


def test_rotated_boxes_are_counted(tmp_path: Path) -> None:
    images(tmp_path / "images")
    content = coco()
    for record, turned in zip(content["annotations"], (90.0, 30, 0.0, 180.0, "x", None), strict=False):
        record["attributes"] = {"occluded": False, "rotation": turned}
    write(tmp_path / "a.json", content)
    write(tmp_path / "data.yaml", "train: a.json\nval: a.json\nnames: [cat, dog]\n")
    (found,) = (line for line in check(tmp_path / "data.yaml").problems if line.startswith("train:"))
    assert found.startswith("train: 2 rotated boxes (attributes.rotation)") and "images/p0.jpg (a.json)" in found
