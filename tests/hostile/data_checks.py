"""Datasets with planted mistakes: `--check-data` reports exactly these."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from tessera.analysis.checks.results import DatasetCheck
from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tests.data.make import write_image
from tests.hostile.damages import named
from tests.hostile.expect import Message, checked, message_or_result

CASES, FAST_CASES = 1000, 15
TIME_LIMIT_S = 60

NAMES = ("cat", "dog", "cow", "hen")
SAID = {  # kind of a mistake → what the check says of it
    "no labels": r"no label file|without a label file, used",
    "labels alone": r"label files? without an image,",
    "corners": r"seem to be written as x1 y1 x2 y2",
    "beyond": r"exceeds? (its|their) image by",
    "shared": r" (is|are) in train too",
    "twice, labels differ": r"several files that differ in their labels",
    "twice": r"several files and equal labels",
    "unknown class": r"set\.yaml names \d class",
    "from 1": r"count from 1\. Subtract 1",
    "case": r"differ only in case",
    "unused class": r"without an object: ",
    "bad image": r"not an image that OpenCV|no such file|the file is empty",
    "cut image": r"truncated file",
    "bad row": r"fields, expected 5",
    "row twice": r"(row is a duplicate|rows are duplicates), used once",
    "flat box": r"without width or height",
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
    """An image and its labels; `raw` replaces the file's bytes."""

    name: str
    seed: int
    size_hw: tuple[int, int]
    boxes: list[Box]
    raw: bytes = b""
    is_labelled: bool = True
    rows: list[str] = field(default_factory=list)  # more rows of the label file


class Plan:
    """A dataset before it is written; mistakes are in boxes of the first class, as counting from 1 moves the last."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.names = rng, [*NAMES]
        self.splits: dict[str, list[Image]] = {}
        self.free: dict[str, list[Image]] = {}  # images without a mistake
        self.alone: list[str] = []  # labels without an image
        self.corners, self.first_class = "", 0
        for split in ("train", "val"):
            images = [self.image(f"{split}{number}") for number in range(rng.randint(22, 26))]
            for image, name in zip(images, NAMES, strict=False):
                image.boxes[0].name = name
            self.splits[split], self.free[split] = images, images[4:]
            for image in rng.sample(images[4:], rng.randint(0, 2)):
                image.boxes = []  # background
                self.free[split].remove(image)
            if rng.random() < 0.3:
                image = self.take(split)
                image.raw = encoded(image) + rng.randbytes(rng.choice((10, 6000)))  # what phones append

    def take(self, split: str = "") -> Image:
        """An image that no other mistake is in."""
        return self.free[split or self.rng.choice(("train", "val"))].pop()

    def image(self, name: str) -> Image:
        boxes = [self.box() for _ in range(self.rng.randint(2, 4))]
        return Image(name, self.rng.randrange(2**32), (self.rng.randint(24, 40), self.rng.randint(24, 40)), boxes)

    def box(self) -> Box:
        """A box inside the image, not too small for coordinates in whole pixels."""
        width, height = self.rng.uniform(0.15, 0.6), self.rng.uniform(0.15, 0.6)
        left, top = self.rng.uniform(0, 1 - width), self.rng.uniform(0, 1 - height)
        return Box(self.rng.choice(NAMES), left, top, left + width, top + height)

    def copy(self, split: str, *, same: bool = True) -> None:
        """Put a copy of an image of train into a split."""
        source = self.take("train")
        boxes = [replace(box) for box in source.boxes]
        if not same:
            boxes[0] = replace(self.box(), name=NAMES[0])
        name = f"copy{self.rng.randrange(10**9)}"
        self.splits[split].append(Image(name, source.seed, source.size_hw, boxes))


def trial(rng: random.Random, folder: Path) -> str:
    """Write a dataset with some kinds of mistakes, check it, and index it as a run does."""
    plan = Plan(rng)
    planted = set(rng.sample(sorted(SAID), rng.choice((0, 1, 1, 1, 2, 3, 5, 8))))
    if "from 1" in planted:  # with a class more than is used, or one too many, there is no telling
        planted -= {"case", "unused class", "unknown class"}
    for mistake in sorted(planted, key=lambda name: (name in ("corners", "from 1"), name)):  # these change whole splits
        _PLANT[mistake](plan)
    if "case" in planted:
        planted.add("unused class")
    spec = load_spec(write(plan, folder))
    check = check_dataset(spec, imgsz=rng.choice((32, 640)))
    for line in check.lines():
        checked(line)
    found = kinds_of(check)
    if "corners" in planted:  # few in corners may be boxes beyond, and the reverse
        found, planted = found - {"beyond"}, planted - {"beyond"}
    assert found == planted, f"planted {sorted(planted)}, found {sorted(found)}:\n" + "\n".join(check.lines())
    indexes = {split: message_or_result(lambda split=split: build_index(spec, split)) for split in ("train", "val")}
    refused = any(isinstance(index, Message) for index in indexes.values())
    # An error is what training refuses; corners alone would be trained on, wrongly.
    assert bool(check.errors) == (refused or "corners" in planted), f"{indexes}\n" + "\n".join(check.lines())
    return f"{len(planted)} kinds"


def kinds_of(check: DatasetCheck) -> set[str]:
    """The kinds of mistakes that a check names; each of its lines must be of one."""
    lines = [*check.errors, *check.problems, *check.notes]
    lines = [line for line in lines if "differ significantly" not in line]
    kinds = {line: {kind for kind, said in SAID.items() if re.search(said, line)} for line in lines}
    for line, found in kinds.items():
        assert found, f"of no kind: {line}"
    found = set[str]().union(*kinds.values())
    return found - {"unknown class"} if not any("Fix the label" in line for line in lines) else found


def encoded(image: Image) -> bytes:
    path = Path(f"{image.seed}.jpg")
    try:
        return write_image(path, image.size_hw, image.seed).read_bytes()
    finally:
        path.unlink()


def several(plan: Plan) -> range:
    return range(plan.rng.randint(1, 4))


def no_labels(plan: Plan) -> None:
    for _ in several(plan):
        plan.take("train").is_labelled = False


def beyond(plan: Plan) -> None:
    box = plan.take("val").boxes[0]  # train may be in corners
    box.name, box.left, box.right = NAMES[0], 0.6, plan.rng.uniform(1.1, 1.3)


def cut_image(plan: Plan) -> None:
    image = plan.take()
    image.raw = encoded(image)[:-60]


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


def shared(plan: Plan) -> None:
    for _ in several(plan):
        plan.copy("val")


_PLANT = {
    **named(no_labels, beyond, shared, unknown_class, cut_image, row_twice, flat_box),
    "labels alone": lambda plan: plan.alone.extend(f"lost{number}" for number in several(plan)),
    "corners": lambda plan: setattr(plan, "corners", "train"),
    "from 1": lambda plan: setattr(plan, "first_class", 1),
    "bad image": lambda plan: setattr(plan.take(), "raw", plan.rng.choice((b"\0", b"no image", b"\xff\xd8\xff"))),
    "bad row": lambda plan: plan.take().rows.append("0 0.5 0.5 0.2"),
    "unused class": lambda plan: plan.names.append("yak"),
    "case": lambda plan: plan.names.append("CAT"),
    "twice": lambda plan: plan.copy("train"),
    "twice, labels differ": lambda plan: plan.copy("train", same=False),
}


def write(plan: Plan, folder: Path) -> Path:
    numbers = {name: number + plan.first_class for number, name in enumerate(plan.names)} | {"zebra": 77}
    for split, images in plan.splits.items():
        labels, end = folder / "labels" / split, plan.rng.choice(("\n", "\r\n"))
        labels.mkdir(parents=True)

        def row(box: Box, in_corners: bool = plan.corners == split) -> str:
            x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
            values = (x, y, box.right - box.left, box.bottom - box.top)
            if in_corners:
                values = (box.left, box.top, box.right, box.bottom)
            return f"{numbers[box.name]} " + " ".join(f"{min(value, 1):.6f}" for value in values)

        for image in images:
            path = write_image(folder / f"images/{split}/{image.name}.jpg", image.size_hw, image.seed)
            if image.raw:
                path.write_bytes(image.raw)
            if image.is_labelled:
                rows = [*map(row, image.boxes), *image.rows]
                (labels / f"{image.name}.txt").write_bytes("".join(text + end for text in rows).encode())
    for name in plan.alone:
        (folder / "labels" / "train" / f"{name}.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    yaml = folder / "set.yaml"
    names = ", ".join(plan.names)
    yaml.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [{names}]\n")
    return yaml
