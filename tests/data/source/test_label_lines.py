"""Location of an object's label."""

from __future__ import annotations

from pathlib import Path

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.scan import ImageLabels, locate_labels
from tests.data.make import write_dataset, write_image
from tests.data.source.annotations.test_voc import voc_object, write_voc
from tests.data.source.made_yaml import build, coco_set

# Objects are in lines 2, 4 and 6: a blank line, an ignored region, a duplicate and a polygon are among them.
TEXT = "\n0 0.5 0.5 0.5 0.5\n-1 0.25 0.5 0.5 1\n1 0.5 0.5 0.25 0.25\n0 0.5 0.5 0.5 0.5\n1 0.5 0 1 0 1 1\n"


def labels(yaml: Path, split: str = "train", **options: bool) -> list[ImageLabels]:
    index = build(yaml, split, **options)
    found = locate_labels(load_spec(yaml), index, range(len(index)), **options)
    return [found[image] for image in range(len(index))]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": TEXT, "train/b": "0 0.5 0.5 0.5 0.5\n1 0.5 0.5 0.2 0.2\n"})
    a, b = labels(yaml)
    assert Path(a.file) == tmp_path / "pets" / "labels" / "train" / "a.txt"
    assert [a.place(row) for row in range(3)] == [(2, None), (4, None), (6, None)] and list(b.lines) == [1, 2]
    assert a.place(-1) == (None, None)
    assert [list(one.lines) for one in labels(yaml, single_cls=True)] == [[2, 4, 6], [1, 2]]


def test_a_file_that_has_changed_has_no_lines(tmp_path: Path) -> None:
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 0.5 0.5\n", "train/b": "0 0.5 0.5 0.5 0.5\n"})
    index = build(yaml)
    folder = tmp_path / "pets" / "labels" / "train"
    (folder / "a.txt").write_text("0 0.5 0.5 0.5 0.4\n")
    (tmp_path / "pets" / "images" / "train" / "b.jpg").unlink()
    found = locate_labels(load_spec(yaml), index, [0, 1])
    assert found[0].place(0) == (None, None) and found[0].file == str(folder / "a.txt")
    assert 1 not in found


def test_lines_of_voc_are_those_of_the_objects(tmp_path: Path) -> None:
    objects = voc_object("cat"), voc_object("dog", extra="<difficult>1</difficult>"), voc_object("dog")
    write_voc(tmp_path, "a", *objects)
    yaml = tmp_path / "a.yaml"
    yaml.write_text("train: JPEGImages\nval: JPEGImages\nnames: [cat, dog]\n")
    (found,) = labels(yaml)
    text = Path(found.file).read_text().splitlines()
    assert found.file.endswith("a.xml") and len(found.lines) == 2
    assert [text[line - 1] for line in found.lines] == [objects[0], objects[2]]


def test_ids_of_a_coco_file(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    rows = [{"id": 7, "iscrowd": 1}, {"id": 40}, {}]
    records = [{"category_id": 3, "bbox": [4, 4, 9, n + 5], **row} for n, row in enumerate(rows)]
    (found,) = labels(coco_set(tmp_path, {"a.jpg": records}, {3: "cat"}), "val")
    assert found.file == str(tmp_path / "set.json")
    assert [found.place(row) for row in range(2)] == [(None, 40), (None, None)]
