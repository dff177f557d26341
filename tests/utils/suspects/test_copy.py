"""A corrected copy has exactly the changes that were suggested, is read again, and leaves the dataset as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from tessera.data.source.held_out import folds
from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.errors import UserError
from tessera.utils.suspects.copy import write_copy
from tessera.utils.suspects.corrections import box_row
from tessera.utils.suspects.evidence import Suspicion
from tessera.utils.suspects.folds import part_of_index
from tessera.utils.suspects.ranking import Suspect
from tessera.utils.types import DatasetIndex, DatasetSpec
from tests.data.make import write_image

NAMES = ["cat", "dog"]
ROWS = [
    "0 0.2 0.2 0.2 0.2",
    "1 0.5 0.5 0.25 0.25",
    "",
    "0 0.1 0.1 0.3 0.1 0.3 0.3",
    "-1 0.8 0.8 0.1 0.1",
    "1 0.7 0.2 0.1 0.1",
]


def text_set(root: Path) -> Path:
    """Three images a split; in the first, a label file with a blank line, a polygon and a region."""
    for split in ("train", "val"):
        for number in range(3):
            write_image(root / "images" / split / f"{number}.jpg", (100, 200), seed=10 * number + (split == "val"))
        labels = root / "labels" / split
        labels.mkdir(parents=True)
        (labels / "0.txt").write_bytes("\r\n".join(ROWS).encode())
        (labels / "1.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    return written(root, train="images/train", val="images/val", names=NAMES)


def coco_set(root: Path) -> Path:
    """The like as COCO JSON, with a crowd."""
    write_image(root / "train" / "a.jpg", (100, 200), seed=1)
    write_image(root / "train" / "b.jpg", (100, 200), seed=9)
    one = {"image_id": 1, "iscrowd": 0, "area": 1}
    annotations = [
        {**one, "id": 5, "category_id": 7, "bbox": [20, 10, 40, 30]},
        {**one, "id": 6, "category_id": 3, "bbox": [120, 50, 40, 30], "segmentation": [[120, 50, 160, 50, 160, 80]]},
        {
            **one,
            "id": 8,
            "category_id": 3,
            "bbox": [0, 0, 20, 20],
            "iscrowd": 1,
            "segmentation": {"counts": [0], "size": [100, 200]},
        },
    ]
    images = [{"id": n, "file_name": f"{name}.jpg", "width": 200, "height": 100} for n, name in ((1, "a"), (2, "b"))]
    categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "train.json").write_text(json.dumps(content))
    return written(root, train="train.json", val="train.json")


def written(root: Path, **content: object) -> Path:
    path = root / "set.yaml"
    path.write_text(yaml.safe_dump({"path": str(root), **content}))
    return path


def suspect(kind: Suspicion, row: int, suggested: int | None, box: tuple[float, ...] | None) -> Suspect:
    return Suspect(0.9, kind, 0, row, -1, None if row < 0 else 0, suggested, 0.9, None, None, box)  # type: ignore[arg-type]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_changes_are_those_suggested_and_all_else_stays(tmp_path: Path) -> None:
    data = text_set(tmp_path / "set")
    before = contents(tmp_path / "set")
    spec = load_spec(data)
    index = build_index(spec, "train")
    asked = [
        suspect(Suspicion.MISSING, -1, 1, (150.0, 50.0, 200.0, 100.0)),
        suspect(Suspicion.SPURIOUS, 0, None, None),
        suspect(Suspicion.SHIFTED, 1, 1, (80.0, 40.0, 120.0, 60.0)),
        suspect(Suspicion.WRONG_CLASS, 2, 1, (20.0, 10.0, 60.0, 30.0)),
        suspect(Suspicion.DUPLICATE, 3, None, None),
    ]
    target = tmp_path / "copy"
    changes = write_copy(target, spec, [index], {0: asked})
    assert contents(tmp_path / "set") == before
    rows = (target / "labels" / "train" / "0.txt").read_text().splitlines()
    assert rows == ["1 0.5 0.5 0.2 0.2", "", "1 0.1 0.1 0.3 0.1 0.3 0.3", ROWS[4], "1 0.875 0.75 0.25 0.5"]
    assert (target / "labels" / "train" / "1.txt").read_text() == "1 0.5 0.5 0.5 0.5\n"
    assert [(c.before, c.after) for c in changes][1:3] == [(ROWS[0], ""), (ROWS[1], rows[0])]
    said = [json.loads(line) for line in (target / "changes.jsonl").read_text().splitlines()]
    assert [row["line"] for row in said] == [None, 1, 2, 4, 6] and {row["copy"] for row in said} == {
        "labels/train/0.txt"
    }
    assert box_row(replace(spec, label_names=spec.names, parts=(("dog", "cat"),)), 0, (0, 0, 2, 2), (2, 2))[0] == "1"
    moved = target.rename(tmp_path / "moved")  # a copy may go elsewhere
    again = load_spec(moved / "set.yaml")
    read = build_index(again, "train")
    assert len(read) == 3 and read.labels(0)[0].tolist() == [1, 1, 1] and len(read.ignored(0)[0]) == 1
    assert build_index(again, "val").path(0) == index.path(0).parents[1] / "val" / "0.jpg"
    assert (moved / "images" / "train" / "0.jpg").is_symlink()


@pytest.mark.parametrize("classes", ["", "classes: [dog]", "classes: {pet: [dog, cat]}"])
@pytest.mark.parametrize("made", [text_set, coco_set])
def test_a_copy_without_changes_is_the_dataset(made: Callable[[Path], Path], classes: str, tmp_path: Path) -> None:
    data = made(tmp_path / "set")
    data.write_text(f"{data.read_text()}{classes}\n")
    spec = load_spec(data)
    index = build_index(spec, "train")
    assert write_copy(tmp_path / "copy", spec, [index], {}) == []
    again = load_spec(tmp_path / "copy" / "set.yaml")
    assert again.names == spec.names
    assert_same(build_index(again, "train"), index)


def assert_same(a: DatasetIndex, b: DatasetIndex) -> None:
    assert len(a) == len(b)
    for image in range(len(a)):
        for one, other in ((a.labels, b.labels), (a.ignored, b.ignored)):
            np.testing.assert_allclose(one(image)[1], other(image)[1], atol=1e-3)
        np.testing.assert_array_equal(a.labels(image)[0], b.labels(image)[0])
        for mine, theirs in zip(a.segments(image), b.segments(image), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-3)


def test_lists_divide_the_images(tmp_path: Path) -> None:
    spec = load_spec(text_set(tmp_path / "set"))
    index = build_index(spec, "train")
    write_copy(tmp_path / "copy", spec, [index], {}, {"fold1": {"train": [0, 2]}})
    part = load_spec(tmp_path / "copy" / "fold1.yaml")
    assert [build_index(part, "train").path(i).name for i in range(2)] == ["0.jpg", "2.jpg"]
    assert len(build_index(part, "val")) == 3
    assert_same(build_index(part, "train"), part_of_index(index, np.array([0, 2])))


@pytest.fixture
def spec(tmp_path: Path) -> DatasetSpec:
    return load_spec(text_set(tmp_path / "set"))


def test_a_label_file_that_has_changed_is_not_guessed_at(spec: DatasetSpec, tmp_path: Path) -> None:
    index = build_index(spec, "train")
    (tmp_path / "set" / "labels" / "train" / "0.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(UserError, match="has changed since"):
        write_copy(tmp_path / "copy", spec, [index], {})
    assert not (tmp_path / "copy").exists()


def test_folds_are_of_equal_size_and_hold_twins_together(tmp_path: Path) -> None:
    images = tmp_path / "set" / "images" / "train"
    rng = np.random.default_rng(0)
    for number in range(10):
        picture = cv2.resize(
            rng.integers(0, 255, (9, 9, 3)).astype(np.uint8), (90, 90), interpolation=cv2.INTER_NEAREST
        )
        for twin in range(2 if number < 3 else 1):
            images.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(images / f"{number}-{twin}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 95 - 20 * twin])
    (tmp_path / "set" / "labels" / "train").mkdir(parents=True)
    (tmp_path / "set" / "labels" / "train" / "0-0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    spec = load_spec(written(tmp_path / "set", train="images/train", val="images/train", names=NAMES))
    index = build_index(spec, "train")
    fold_of = folds(spec, index, 3)
    assert sorted(np.bincount(fold_of).tolist()) == [4, 4, 5]
    for number in range(3):
        assert fold_of[2 * number] == fold_of[2 * number + 1]
    np.testing.assert_array_equal(folds(spec, index, 3), fold_of)
    with pytest.raises(UserError, match=r"--folds 14: train has 13 images that differ, expected at least 14"):
        folds(spec, index, 14)
