"""Datasets with planted mistakes: `--check-data` reports exactly these."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from tessera.analysis.checks.results import DatasetCheck
from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.types import DatasetIndex, DatasetSpec
from tests.data.labels.test_voc import voc, voc_object
from tests.data.make import write_image
from tests.hostile.damages import named
from tests.hostile.expect import Message, checked, message_or_result

CASES, FAST_CASES = 1500, 15
TIME_LIMIT_S = 60

NAMES = ("cat", "dog", "cow", "hen")
SAID = {  # kind of a mistake → what the check says of it
    "no labels": r"no label file|without a label file, used",
    "labels alone": r"label files? without an image,|XML files? without an image of that name",
    "corners": r"seem to be written as x1 y1 x2 y2",
    "beyond": r"exceeds? (its|their) image by",
    "shared": r" (is|are) in train too",
    "twice, labels differ": r"several files that differ in their labels",
    "twice": r"several files and equal labels",
    "unknown class": r"set\.yaml names \d class",
    "from 1": r"count from 1\. Subtract 1",
    "case": r"differ only in case",
    "unused class": r"without an object: |found no category named",
    "bad picture": r"not an image that OpenCV|no such file|the file is empty",
    "cut picture": r"truncated file",
    "bad row": r"fields, expected 5|is smaller than|expected x, y, width",
    "row twice": r"(row is a duplicate|rows are duplicates), used once",
    "flat box": r"without width or height",
    "other size": r"made for",
}
_FORMATS = {
    "text": frozenset(SAID) - {"other size"},
    "coco": frozenset(SAID) - {"no labels", "labels alone", "from 1", "flat box"},
    "voc": frozenset(SAID) - {"corners", "from 1", "flat box"},
}


@dataclass
class Box:
    """An object: its class, and corners as fractions."""

    name: str
    left: float
    top: float
    right: float
    bottom: float


@dataclass
class Image:
    """An image and its labels; `raw` replaces the file's bytes, None in its place is no file."""

    name: str
    seed: int
    size_hw: tuple[int, int]
    boxes: list[Box]
    raw: bytes | None = b""
    is_labelled: bool = True
    rows: list[str] = field(default_factory=list)  # more rows, as the format writes them
    stated_hw: tuple[int, int] | None = None


@dataclass
class Plan:
    """A dataset before it is written; mistakes are in boxes of the first class, as counting from 1 moves the last."""

    rng: random.Random
    kind: str  # "text", "coco" or "voc"
    splits: dict[str, list[Image]]
    names: list[str]
    free: dict[str, list[Image]]  # images without a mistake
    alone: list[str] = field(default_factory=list)  # labels without an image
    corners: str = ""
    first_class: int = 0

    def take(self, split: str = "") -> Image:
        """An image that no other mistake is in."""
        return self.free[split or self.rng.choice(("train", "val"))].pop()

    def image(self, name: str) -> Image:
        boxes = [self.box() for _ in range(self.rng.randint(2, 4))]
        size_hw = self.rng.randint(24, 40), self.rng.randint(24, 40)
        return Image(name, self.rng.randrange(2**32), size_hw, boxes)

    def box(self) -> Box:
        """A box inside the image, not too small for coordinates in whole pixels."""
        width, height = self.rng.uniform(0.15, 0.6), self.rng.uniform(0.15, 0.6)
        left, top = self.rng.uniform(0, 1 - width), self.rng.uniform(0, 1 - height)
        return Box(self.rng.choice(NAMES), left, top, left + width, top + height)


def trial(rng: random.Random, folder: Path) -> str:
    """Write a dataset with some kinds of mistakes, check it, and index it as a run does."""
    kind = rng.choice([*_FORMATS])
    plan = make_plan(rng, kind)
    planted = set(rng.sample(sorted(_FORMATS[kind]), rng.choice((0, 1, 1, 1, 2, 3, 5, 8))))
    held_out = rng.random() < 0.25
    if "from 1" in planted:  # with a class more than is used, or one too many, there is no telling
        planted -= {"case", "unused class", "unknown class"}
    if held_out:
        planted -= {"shared"}
    for mistake in sorted(planted, key=lambda name: (name in ("corners", "from 1"), name)):  # these change whole splits
        _PLANT[mistake](plan)
    if "case" in planted:
        planted.add("unused class")
    yaml = write(plan, folder, 0.25 if held_out else None)

    spec = load_spec(yaml)
    check = check_dataset(spec, imgsz=rng.choice((32, 640)))
    for line in check.lines():
        checked(line)
    found = kinds_of(check)
    if held_out:
        found -= {"unused class"} - planted  # the images with a class may all be in val
    if "corners" in planted:  # few in corners may be boxes beyond, and the reverse
        found, planted = found - {"beyond"}, planted - {"beyond"}
    assert found == planted, f"planted {sorted(planted)}, found {sorted(found)}:\n" + "\n".join(check.lines())
    indexes = {split: message_or_result(lambda split=split: build_index(spec, split)) for split in ("train", "val")}
    refused = any(isinstance(index, Message) for index in indexes.values())
    # An error is what training refuses; corners alone would be trained on, wrongly.
    assert bool(check.errors) == (refused or "corners" in planted), f"{indexes}\n" + "\n".join(check.lines())
    if not refused and held_out:
        check_division(spec, indexes, check)
    return f"{kind}{', held out' if held_out else ''}, {len(planted)} kinds"


def kinds_of(check: DatasetCheck) -> set[str]:
    """The kinds of mistakes that a check names; each of its lines must be of one."""
    lines = [*check.errors, *check.problems, *check.notes]
    lines = [line for line in lines if "differ significantly" not in line]
    kinds = {line: {kind for kind, said in SAID.items() if re.search(said, line)} for line in lines}
    for line, found in kinds.items():
        assert found, f"of no kind: {line}"
    found = set[str]().union(*kinds.values())
    return found - {"unknown class"} if not any("Fix the label" in line for line in lines) else found


def check_division(spec: DatasetSpec, indexes: dict[str, DatasetIndex | Message], check: DatasetCheck) -> None:
    """Each image is on one side, and so are copies."""
    sides = {}
    for split, index in indexes.items():
        assert isinstance(index, DatasetIndex) and len(index), split
        sides[split] = {index.path(number) for number in range(len(index))}
    assert not sides["train"] & sides["val"] and len(sides["train"]) + len(sides["val"]) == check.images
    contents = [{path.read_bytes() for path in paths} for paths in sides.values()]
    assert not contents[0] & contents[1], "copies are on both sides"
    assert len(sides["val"]) <= 0.3 * check.images + 2, spec.held_out


def make_plan(rng: random.Random, kind: str) -> Plan:
    """A dataset without a mistake, with what is unusual but right."""
    plan = Plan(rng, kind, {}, list(NAMES), {})
    for split in ("train", "val"):
        images = [plan.image(f"{split}{number}") for number in range(rng.randint(22, 26))]
        for image, name in zip(images, NAMES, strict=False):
            image.boxes[0].name = name
        plan.splits[split], plan.free[split] = images, images[4:]
        for image in rng.sample(images[4:], rng.randint(0, 2)):
            image.boxes = []  # background
            plan.free[split].remove(image)
        if rng.random() < 0.3:
            image = plan.take(split)
            image.raw = picture(image) + rng.randbytes(rng.choice((10, 6000)))  # what phones append
    return plan


def picture(image: Image) -> bytes:
    path = Path(f"{image.seed}.jpg")
    try:
        return write_image(path, image.size_hw, image.seed).read_bytes()
    finally:
        path.unlink()


def copy_of(plan: Plan, source: Image, split: str, *, same: bool = True) -> None:
    boxes = [Box(**vars(box)) for box in source.boxes]
    if not same:
        boxes[0] = plan.box()
        boxes[0].name = NAMES[0]
    copy = Image(f"copy{plan.rng.randrange(10**9)}", source.seed, source.size_hw, boxes)
    plan.splits[split].append(copy)


def no_labels(plan: Plan) -> None:
    for _ in range(plan.rng.randint(1, 4)):
        plan.take("train").is_labelled = False


def beyond(plan: Plan) -> None:
    box = plan.take("val").boxes[0]  # train may be in corners
    box.name, box.left, box.right = NAMES[0], 0.6, plan.rng.uniform(1.1, 1.3)


def bad_picture(plan: Plan) -> None:
    plan.take().raw = plan.rng.choice((b"", b"no picture", b"\xff\xd8\xff"))[:] or b"\0"


def cut_picture(plan: Plan) -> None:
    image = plan.take()
    image.raw = picture(image)[:-60]


def bad_row(plan: Plan) -> None:
    row = {"text": "0 0.5 0.5 0.2", "coco": "[3, 3, -2, 5]", "voc": "9 9 3 12"}[plan.kind]
    plan.take().rows.append(row)


def row_twice(plan: Plan) -> None:
    image = plan.take()
    image.boxes[0].name = NAMES[0]
    image.boxes.append(image.boxes[0])


def flat_box(plan: Plan) -> None:
    box = plan.take("val").boxes[0]
    box.name, box.right = NAMES[0], box.left


def unknown_class(plan: Plan) -> None:
    for _ in range(plan.rng.randint(1, 3)):
        plan.take("train").boxes[0].name = "zebra"


def other_size(plan: Plan) -> None:
    image = plan.take()
    image.stated_hw = image.size_hw[0] + 9, image.size_hw[1]


def shared(plan: Plan) -> None:
    for _ in range(plan.rng.randint(1, 4)):
        copy_of(plan, plan.take("train"), "val")


def labels_alone(plan: Plan) -> None:
    plan.alone = [f"lost{number}" for number in range(plan.rng.randint(1, 4))]


def corners(plan: Plan) -> None:
    plan.corners = "train"


def from_1(plan: Plan) -> None:
    plan.first_class = 1


_PLANT = {
    **named(no_labels, labels_alone, corners, beyond, shared, unknown_class, from_1),
    **named(bad_picture, cut_picture, bad_row, row_twice, flat_box, other_size),
    "unused class": lambda plan: plan.names.append("yak"),
    "case": lambda plan: plan.names.append("CAT"),
    "twice": lambda plan: copy_of(plan, plan.take("train"), "train"),
    "twice, labels differ": lambda plan: copy_of(plan, plan.take("train"), "train", same=False),
}


def write(plan: Plan, folder: Path, held_out: float | None) -> Path:
    entries = []
    for split, images in plan.splits.items():
        for image in images:
            path = write_image(folder / f"images/{split}/{image.name}.jpg", image.size_hw, image.seed)
            if image.raw:
                path.write_bytes(image.raw)
        _WRITE[plan.kind](plan, folder, split, images)
        entries.append(f"annotations/{split}.json" if plan.kind == "coco" else f"images/{split}")
    train, val = entries
    if held_out:
        train, val = f"[{train}, {val}]", f"{held_out}\nsplit_seed: {plan.rng.randrange(3)}"
    yaml = folder / "set.yaml"
    yaml.write_text(f"path: {folder}\ntrain: {train}\nval: {val}\nnames: [{', '.join(plan.names)}]\n")
    return yaml


def write_text(plan: Plan, folder: Path, split: str, images: list[Image]) -> None:
    labels = folder / "labels" / split
    labels.mkdir(parents=True)
    first = plan.first_class
    numbers = {name: number + first for number, name in enumerate(plan.names)} | {"zebra": 77}

    def row(box: Box) -> str:
        x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        values = (x, y, box.right - box.left, box.bottom - box.top)
        if plan.corners == split:
            values = (box.left, box.top, box.right, box.bottom)
        return f"{numbers[box.name]} " + " ".join(f"{min(value, 1):.6f}" for value in values)

    end = plan.rng.choice(("\n", "\r\n"))
    for image in images:
        if image.is_labelled:
            rows = [*map(row, image.boxes), *image.rows]
            (labels / f"{image.name}.txt").write_bytes("".join(text + end for text in rows).encode())
    if split == "train":
        for name in plan.alone:
            (labels / f"{name}.txt").write_text("1 0.5 0.5 0.2 0.2\n")
        (labels / "classes.txt").write_text("\n".join(plan.names))


def write_voc(plan: Plan, folder: Path, split: str, images: list[Image]) -> None:
    labels = folder / "annots" / split
    labels.mkdir(parents=True)

    def of(box: Box, size_hw: tuple[int, int]) -> str:
        height, width = size_hw
        left, top = box.left * width + 1, box.top * height + 1
        return voc_object(box.name, f"{left} {top} {box.right * width} {box.bottom * height}")

    def put(name: str, size_hw: tuple[int, int], objects: list[str]) -> None:
        size = f"<size><width>{size_hw[1]}</width><height>{size_hw[0]}</height></size>"
        (labels / f"{name}.xml").write_bytes(voc(*objects, size=size))

    for image in images:
        if image.is_labelled:
            objects = [of(box, image.size_hw) for box in image.boxes]
            objects += [voc_object("cat", row) for row in image.rows]
            put(image.name, image.stated_hw or image.size_hw, objects)
    if split == "train":
        for name in plan.alone:
            put(name, (40, 40), [voc_object("cat", "1 1 20 20")])


def write_coco(plan: Plan, folder: Path, split: str, images: list[Image]) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    used = [*NAMES, "zebra"] if any(box.name == "zebra" for image in images for box in image.boxes) else [*NAMES]
    ids = {name: 3 * number + 5 for number, name in enumerate(used)}
    records, annotations = [], []
    for number, image in enumerate(images):
        height, width = image.stated_hw or image.size_hw
        records.append({"id": number, "file_name": f"{image.name}.jpg", "height": height, "width": width})
        height, width = image.size_hw
        for box in image.boxes:
            left, top, right, bottom = box.left * width, box.top * height, box.right * width, box.bottom * height
            values = [left, top, right, bottom] if plan.corners == split else [left, top, right - left, bottom - top]
            annotations.append({"image_id": number, "category_id": ids[box.name], "bbox": values})
        annotations += [{"image_id": number, "category_id": 5, "bbox": json.loads(row)} for row in image.rows]
    plan.rng.shuffle(annotations)
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    content = {"images": records, "annotations": annotations, "categories": categories}
    (folder / f"annotations/{split}.json").write_text(json.dumps(content))


_WRITE = {"text": write_text, "coco": write_coco, "voc": write_voc}
