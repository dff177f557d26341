"""`classes` of a dataset YAML, and class names of weights matched to those of a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.data.labels.classes import match_classes, renamed_classes, reordered_classes
from tessera.data.source.dataset_yaml import load_spec
from tessera.utils.errors import UserError
from tessera.utils.types import DatasetIndex
from tests.data.labels.test_voc import voc_object, write_voc
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build, check, coco_set, dataset, refuse, write

ROWS = {number: f"{number} 0.5 0.5 0.{number + 1} 0.5\n" for number in range(4)}
NAMES = "[person, car, truck, dog]"


def made(root: Path, more: str) -> Path:
    """Train: a person, a car and a truck; a dog; a truck and a dog; nothing. Val: a person."""
    rows = {"train/a": ROWS[0] + ROWS[1] + ROWS[2], "train/b": ROWS[3], "train/c": ROWS[2] + ROWS[3], "train/d": ""}
    yaml = write_dataset(root / "street", {**rows, "val/a": ROWS[0]}, NAMES)
    yaml.write_text(f"{yaml.read_text()}{more}\n")
    return yaml


def objects(index: DatasetIndex) -> list[list[str]]:
    """Names of the objects of each image, with the width of each in tenths, which shows its class in the labels."""
    found = []
    for image in range(len(index)):
        classes, boxes = index.labels(image)
        widths = np.rint((boxes[:, 2] - boxes[:, 0]) / 6.4).astype(int)
        found.append([f"{index.names[c]} {width}" for c, width in zip(classes.tolist(), widths, strict=True)])
    return found


@pytest.mark.parametrize(
    ("classes", "names", "first", "third"),
    [
        ("[truck, person]", ("truck", "person"), ["person 1", "truck 3"], "truck 3"),
        ("[2, person]", ("truck", "person"), ["person 1", "truck 3"], "truck 3"),
        ("{vehicle: [car, 2], who: person}", ("vehicle", "who"), ["who 1", "vehicle 2", "vehicle 3"], "vehicle 3"),
    ],
)
def test_a_subset_in_its_own_order_and_merged(
    tmp_path: Path, classes: str, names: tuple[str, ...], first: list[str], third: str
) -> None:
    found = [first, [], [third], []]
    yaml = made(tmp_path, f"classes: {classes}")
    index = build(yaml)
    assert index.names == load_spec(yaml).names == names and objects(index) == found and not index.problems
    assert objects(build(yaml)) == found and build(yaml).excluded_summary == index.excluded_summary, "from the cache"
    single = build(yaml, single_cls=True)
    assert [len(row) for row in objects(single)] == [len(row) for row in found], "what is excluded stays so"


def test_it_says_what_is_excluded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    yaml = made(tmp_path, "classes: [person, car]\nignore: {4: unsure}")
    said = (
        "train: `classes` excludes 2 of 5 classes with 4 objects in 3 images, 2 of which are background without "
        "them: 'truck' 2, 'dog' 2"
    )
    assert build(yaml).excluded_summary == said and said in caplog.messages
    assert said in check(yaml).facts
    assert build(made(tmp_path / "all", "")).excluded_summary == ""
    yaml = write_dataset(tmp_path / "dogs", {"train/a": ROWS[3], "val/a": ""}, NAMES)
    yaml.write_text(f"{yaml.read_text()}classes: [car]\n")
    with pytest.raises(
        UserError,
        match=r"no label is of a class that `classes` keeps\. .* 1 object in 1 image, 1 of which is .*: 'dog' 1",
    ):
        build(yaml)


def test_ignored_classes_stay_ignored_whatever_is_kept(tmp_path: Path) -> None:
    """The image of an ignored region is no background for what it leaves out."""
    yaml = made(tmp_path, "")
    yaml.write_text(yaml.read_text().replace(NAMES, "{0: person, 1: car, 2: truck}\nignore: {3: dog}\nclasses: [car]"))
    index = build(yaml)
    assert objects(index) == [["car 2"], [], [], []]
    assert index.ignored_offsets.tolist() == [0, 0, 1, 2, 2] and index.ignored_classes.tolist() == [-1, -1]
    assert "excludes 2 of 4 classes with 3 objects in 2 images, 0 of which are background" in index.excluded_summary
    (regions,) = (line for line in check(yaml).facts if line.startswith("train: 2 ignored regions"))
    assert regions.endswith("'dog' 2")


def test_classes_are_part_of_the_index_and_of_a_run(tmp_path: Path) -> None:
    yaml = made(tmp_path, "CLASSES")
    text = yaml.read_text()
    hashes, digests = set(), set()
    for classes in ("", "classes: [person, car]", "classes: [car, person]", "classes: {a: car, b: [person, truck]}"):
        index = build(write(yaml, text.replace("CLASSES", classes)))
        hashes.add(index.content_hash())
        digests.add(index.digest)
    assert len(hashes) == len(digests) == 4
    whole = build(write(yaml, text.replace("CLASSES", "classes: [person, car, truck, dog]")))
    yaml.write_text(text.replace("CLASSES", ""))
    assert whole.content_hash() == build(yaml).content_hash(), "what is trained on is the same"


def coco(root: Path, more: str) -> Path:
    write_image(root / "a.jpg")
    boxes = {3: [0, 0, 6.4, 8], 7: [8, 0, 12.8, 8], 20: [16, 0, 19.2, 8]}
    rows = [{"category_id": own, "bbox": box} for own, box in boxes.items()]
    rows += [{"category_id": own, "bbox": [30, 0, 8, 8], "iscrowd": 1} for own in (3, 20)]
    return coco_set(root, {"a.jpg": rows}, {3: "person", 7: "car", 20: "truck"}, more)


@pytest.mark.parametrize("names", ["", "names: [truck, car, person]\n"])
def test_categories_of_coco_keep_their_ids(tmp_path: Path, names: str) -> None:
    """A crowd of an excluded class is no region; a merged class has an id of its own, or its namesake's."""
    index = build(coco(tmp_path, f"{names}classes: [car, person]\n"))
    assert objects(index) == [["person 1", "car 2"]] and index.coco_ids() == ((1,), (7, 3))
    assert index.ignored_classes.tolist() == [1]
    index = build(coco(tmp_path, names + "classes: {vehicle: [car, truck], car: [person]}\n"))
    assert objects(index) == [["car 1", "vehicle 2", "vehicle 3"]] and index.coco_ids() == ((1,), (21, 3))
    assert build(coco(tmp_path, names + "classes: {car: [car, truck]}\n")).coco_ids() == ((1,), (7,))
    assert build(coco(tmp_path, names + "classes: [truck]\n"), single_cls=True).coco_ids() == ((1,), (20,))
    assert not [line for line in check(tmp_path / "coco.yaml").lines() if "no category" in line]


def test_names_of_voc(tmp_path: Path) -> None:
    cow = voc_object("cow", "1 1 200 8")  # beyond the image, but of a class that does not matter
    write_voc(tmp_path / "voc", "a", voc_object(), voc_object("dog", "17 13 32 24"), cow)
    yaml = tmp_path / "voc.yaml"
    head = "path: voc\ntrain: Annotations\nval: Annotations\nnames: [cat, dog, cow]\n"
    index = build(write(yaml, f"{head}classes: {{pet: [cat, dog]}}\n"))
    assert index.classes.tolist() == [0, 0] and index.names == ("pet",) and not index.problems
    assert not [line for line in check(yaml).problems if "beyond" in line]
    yaml.write_text(head.replace(", cow]", "]") + "classes: [cat]\n")
    with pytest.raises(UserError, match=r"class 'cow', but voc\.yaml names 2 classes"):
        build(yaml)


def test_mistakes(tmp_path: Path) -> None:
    dataset(tmp_path)
    body = "train: images/train\nval: images/val\nnames: [cat, dog]\n"
    refuse(tmp_path, f"{body}classes: [cat, dgo]\n", r"a\.yaml:4: classes: no class .* 'dgo'\. Did you mean 'dog'")
    refuse(tmp_path, f"{body}classes:\n- cat\n- 2\n", r"a\.yaml:6: classes: found 2, but .* are 0 to 1")
    refuse(tmp_path, f"{body}classes: []\n", r"a\.yaml:4: classes: found \[\], expected a list of classes")
    refuse(tmp_path, f"{body}classes: 2\n", r"a\.yaml:4: classes: found 2, expected a list")
    refuse(tmp_path, f"{body}classes: [cat, 0]\n", r"a\.yaml:4: classes: found 'cat' twice, expected each class once")
    merged = "classes:\n  pet: [cat, dog]\n  hound: [dog]\n"
    refuse(tmp_path, body + merged, r"a\.yaml:6: classes: found 'dog' twice, in 'pet' and in 'hound', expected each")
    refuse(tmp_path, f"{body}classes: {{pet: []}}\n", r"a\.yaml:4: classes: 'pet' merges no class")
    both = r"a\.yaml:5: classes: 'cow' is in ignore too, whose objects are neither"
    refuse(tmp_path, f"{body}ignore: [cow]\nclasses: [cat, cow]\n", both)
    refuse(tmp_path, f"{body}ignore: [cow]\nclasses: {{cow: cat}}\n", both)
    refuse(tmp_path, f"{body}classes: {{1: cat, '1': dog}}\n", r"found the name '1' twice")
    yaml = coco(tmp_path / "coco", "classes: [7]\n")
    with pytest.raises(UserError, match=r"coco\.yaml:4: classes: found 7, but COCO categories are selected by name"):
        load_spec(yaml)


@pytest.mark.parametrize(
    ("known", "wanted", "found"),
    [
        (["cat", "dog"], ["cat", "dog"], (0, 1)),
        (["cat", "dog"], ["bird", "dog", "cat"], (-1, 1, 0)),
        (["cat", "traffic light"], ["TrafficLight", " Cat"], (1, 0)),
        (["Cat", "cat"], ["cat"], (1,)),  # what is equal goes first
        (["Cat", "cat"], ["cat", "CAT"], (1, 0)),  # and is out of the others' way
        (["Cat", "cat"], ["CAT"], (-1,)),  # which of the two?
        (["cat"], ["Cat", "CAT"], (-1, -1)),
        (["cat", "cat"], ["cat"], (-1,)),
        (["0", "1"], ["cat", "dog"], (0, 1)),
        (["cat", "dog"], ["0", "1"], (0, 1)),
        (["0", "1", "2"], ["0", "1"], (-1, -1)),
        (["9", "4"], ["4", "9", "7"], (1, 0, -1)),  # but labels of digits may be
        (["card"], ["item"], (0,)),  # --single-cls
        (["item", "box"], ["item"], (0,)),
        (["cat", "dog"], ["item"], (-1,)),
        ([], ["cat"], (-1,)),
    ],
)
def test_classes_match_by_name(known: list[str], wanted: list[str], found: tuple[int, ...]) -> None:
    assert match_classes(known, wanted) == found


def test_reordered_and_renamed_classes_are_named() -> None:
    assert reordered_classes(["cat", "dog"], ["Cat ", "hound"]) == ""
    assert reordered_classes(["cat", "dog"], ["dog", "cat"]) == (
        "'cat' is 0 in the checkpoint and 1 in the data, 'dog' is 1 in the checkpoint and 0 in the data"
    )
    assert reordered_classes([*"abcdef"], [*"bcdefa"]).endswith("and 3 more")
    assert renamed_classes(["cat", "dog"], ["pear", "plum"]).startswith("0 is 'cat' in the checkpoint and 'pear' in")
    assert renamed_classes(["cat", "dog", "cow"], ["Cat", "hound", "cow"]) == "", "one that is spelled otherwise"
    assert renamed_classes(["0", "1"], ["cat", "dog"]) == "", "no names at all"
    assert renamed_classes(["cat", "dog"], ["pear"]) == ""
