"""Ignored regions: their sources, class numbers and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tessera.data.source.dataset_yaml import load_spec
from tessera.utils.types import DatasetIndex
from tests.data.labels.test_voc import voc_object, write_voc
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build, check, coco_set, refuse, write

TEXT = "0 0.5 0.5 0.5 0.5\n-1 0.25 0.5 0.5 1\n1 0.5 0.5 0.25 0.25\n-1 0.5 0 1 0 1 1\n"


def found(index: DatasetIndex) -> tuple[list[int], list[int], list[list[float]]]:
    """Classes of the objects, and classes and boxes of the regions, of the first image."""
    classes, boxes = index.ignored(0)
    return index.labels(0)[0].tolist(), classes.tolist(), np.round(boxes, 3).tolist()


def test_rows_of_class_minus_one_are_regions(tmp_path: Path) -> None:
    """Boxes, and polygons by their boxes; of every class."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": TEXT, "train/b": "0 0.5 0.5 0.5 0.5\n"})
    index = build(yaml)
    regions = [[0, 0, 32, 48], [32, 0, 64, 48]]
    assert found(index) == ([0, 1], [-1, -1], regions) and not index.problems
    assert index.ignored_offsets.tolist() == [0, 2, 2] and len(index.classes) == 3
    assert found(build(yaml, single_cls=True)) == ([0, 0], [-1, -1], regions)
    assert found(build(yaml)) == found(index), "from the cache"


@pytest.mark.parametrize(
    ("names", "ignore"),
    [("[cat]", "[dog]"), ("{0: cat}", "{1: dog}"), ("{1: dog}", "{0: cat}"), ("[cat]", "{'1': dog, 2: cow}")],
)
def test_an_ignored_class_keeps_its_number_in_label_files(tmp_path: Path, names: str, ignore: str) -> None:
    """Trained classes count from 0 in any case."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 1 1\n1 0.25 0.5 0.5 1\n"}, names)
    index = build(write(yaml, yaml.read_text() + f"ignore: {ignore}\n"))
    box = [0, 0, 64, 48] if "0: cat" in ignore else [0, 0, 32, 48]
    assert found(index) == ([0], [-1], [box])
    assert index.names == load_spec(yaml).names == (("dog",) if "1: dog" in names else ("cat",))
    assert found(build(yaml, single_cls=True)) == ([0], [-1], [box])


def test_difficult_objects_and_ignored_names_of_voc(tmp_path: Path) -> None:
    hard = "<difficult>1</difficult>"
    write_voc(
        tmp_path / "voc",
        "a",
        *(voc_object(), voc_object("dog", "17 13 32 24", extra=hard), voc_object("cow", "1 1 8 8")),
        voc_object("cow", "1 1 9 9", extra=hard),
    )
    yaml = tmp_path / "voc.yaml"
    yaml.write_text("path: voc\ntrain: Annotations\nval: Annotations\nnames: [cat, dog]\nignore: [cow]\n")
    regions = [[16, 12, 32, 24], [0, 0, 8, 8], [0, 0, 9, 9]]
    assert found(build(yaml)) == ([0], [1, -1, -1], regions)
    assert found(build(yaml, single_cls=True)) == ([0], [0, -1, -1], regions)
    write_voc(tmp_path / "voc", "a", voc_object(), voc_object("zebra", "1 1 8 8", extra=hard))
    assert found(build(yaml, single_cls=True)) == ([0], [0], [[0, 0, 8, 8]]), "any other name is the one class"


def coco(tmp_path: Path, more: str, bad: bool = False) -> Path:
    """A cat, a dog, a cow and a crowd of cats, and perhaps a cow without a box."""
    write_image(tmp_path / "a.jpg")
    rows = [(c, [8 * at, 0, 8, 8], at == 3) for at, c in enumerate((1, 2, 3, 1))] + [(3, None, 0)] * bad
    records = [{"category_id": c, "bbox": box, "iscrowd": crowd} for c, box, crowd in rows]
    return coco_set(tmp_path, {"a.jpg": records}, {1: "cat", 2: "dog", 3: "cow"}, more)


@pytest.mark.parametrize("names", ["", "names: [cat, dog]\n"])
def test_crowds_and_ignored_categories_of_coco(tmp_path: Path, names: str) -> None:
    yaml = coco(tmp_path, f"{names}ignore: [cow]\n", bad=True)
    index = build(yaml)
    assert index.names == ("cat", "dog")
    assert found(index) == ([0, 1], [-1, 0], [[16, 0, 24, 8], [24, 0, 32, 8]])
    (problem,) = index.problems
    assert "annotations[4]: bbox is null" in problem and problem.endswith("ignored region skipped")
    assert index.coco_ids() == ((1,), (1, 2))
    assert build(coco(tmp_path, "ignore: [cat]\n"), single_cls=True).coco_ids() == ((1,), (2,))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "names: [cat, dog]\nignore: [dog]\n",
            "a.yaml:3: ignore: 'dog' is in names too.* as maps from class numbers: .*`ignore: {1: \"dog\"}`",
        ),
        ("names: [cat, dog]\nignore: [dog, cat]\n", "a.yaml:3: ignore: found all of names, so no class is trained"),
        ("names: [cat, dog]\nignore: {1: cow}\n", r"a.yaml:3: ignore: class 1 is 'cow', but in names it is 'dog'"),
        ("names: [cat]\nignore: {2: cow}\n", "found the key 2, but none for class 1, expected .* without gaps"),
        ("names: {0: cat, 2: dog}\nignore: [cow]\n", "found the key 3, but none for class 1, expected .* without gaps"),
        ("names: [cat]\nignore: cow\n", "ignore: found 'cow', expected a list"),
        ("names: [cat]\nignore: [cow, cow]\n", "ignore: 'cow' is the name of classes 1 and 2"),
        ("names: [cat]\nignore: [true]\n", "ignore: class 1 is True, expected a name"),
    ],
)
def test_mistakes_of_ignore(tmp_path: Path, text: str, what: str) -> None:
    refuse(tmp_path, f"train: images\n{text}", what)


def test_ignored_categories_go_by_name(tmp_path: Path) -> None:
    spec = load_spec(coco(tmp_path, "ignore: {0: cow}\n"))
    assert (spec.names, spec.ignore) == (("cat", "dog"), ("cow",))
    text = coco(tmp_path, "ignore: [cow, cat, dog]\n").read_text()
    refuse(tmp_path, text, "ignore: found all 3 categories, so no class is trained")
    refuse(tmp_path, text.replace("cow, cat, dog", "cwo"), "no category is named 'cwo'. Did you mean 'cow'")


def test_an_ignored_name_that_no_label_has_is_warned_of(tmp_path: Path) -> None:
    yaml = coco(tmp_path, "names: [cat, dog, cow]\nignore: [sheep]\n")
    line = "train: coco.yaml: ignore: no label is of class 'sheep'. Check the name."
    assert line in build(yaml).notes and line in check(yaml).notes
    assert not build(yaml, "val").notes


def test_the_check_counts_them(tmp_path: Path) -> None:
    labels = {"train/a": f"{TEXT}2 0.5 0.5 0.1 0.1\n", "train/b": "0 0.5 0.5 0.5 0.5\n", "val/a": TEXT}
    yaml = write_dataset(tmp_path / "pets", labels)
    result = check(write(yaml, f"{yaml.read_text()}ignore: [cow]\n"))
    assert (
        "train: 3 ignored regions in 1 image, neither object nor background: rows of class -1 2, 'cow' 1"
        in result.facts
    )
    assert result.objects == 5 and not result.errors


def test_the_check_counts_no_ignored_box_and_no_ignored_image_as_background(tmp_path: Path) -> None:
    yaml = coco(tmp_path, "ignore: [cow]\n")
    content = json.loads((tmp_path / "set.json").read_text())
    content["annotations"][2]["bbox"] = [16, 0, 90, 8]
    write_image(tmp_path / "b.jpg", seed=1)
    content["images"].append({"id": 2, "file_name": "b.jpg"})
    content["annotations"].append({"image_id": 2, "category_id": 3, "bbox": [40, 0, 90, 8]})
    (tmp_path / "set.json").write_text(json.dumps(content))
    result = check(yaml)
    assert not any(" of its side" in line for line in result.problems)
    counts = "1 with objects; 1 with ignored regions alone; as background, 0 whose labels hold no object and 0 without"
    assert f"train: 2 images: {counts} a label file" in result.facts
    write_voc(tmp_path / "voc", "a", voc_object(), voc_object("cow", "9 9 99 24"))
    (tmp_path / "voc.yaml").write_text("path: voc\ntrain: Annotations\nnames: [cat]\nignore: [cow]\n")
    assert not check(tmp_path / "voc.yaml").problems
