"""Box checks: boxes outside the image, and corners instead of centre and size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tessera.analysis.checks.results import DatasetCheck
from tests.data.labels.test_voc import voc, voc_object
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import check, coco_set, write

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
