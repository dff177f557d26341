"""COCO JSON: a file of a split, written as its images come."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.data.conversion.numbers import parse_written
from tessera.data.conversion.objects import LabelledImage, plain, record_text
from tessera.data.source.annotations.coco import category_of
from tessera.utils.files import atomic_write, open_plain
from tessera.utils.text import strict_json
from tessera.utils.types import CocoId


@dataclass(frozen=True)
class ExactCoco:
    """A COCO file with all digits of its numbers.

    Attributes:
        images: id → record.
        annotations: in the order of the file.
        categories: name → record.
        names: id → name.
    """

    images: dict[CocoId, dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: Mapping[str, Mapping[str, Any]]
    names: Mapping[int, str]

    def name(self, annotation: int) -> str | None:
        """The class of an annotation; None where the file has no such category."""
        return category_of({"category_id": plain(self.annotations[annotation].get("category_id"))}, self.names)

    def place(self, image: CocoId) -> str:
        """Where an image lies below its folder, as the file has it; "" where it says another way."""
        stated = os.path.normpath(str(self.images[image]["file_name"]))
        return "" if stated.startswith(("..", "/")) else stated

    def more(self, image: CocoId) -> dict[str, Any]:
        """What the file says of an image beside its name and size."""
        return {key: value for key, value in self.images[image].items() if key not in ("file_name", "height", "width")}


def read_exactly(file: Path, categories: Mapping[int, str]) -> ExactCoco:
    """Read a file that `read_coco` has read.

    Args:
        file: the JSON.
        categories: id → name, as `read_coco` has them.
    """
    with open_plain(file) as opened:
        content = json.load(opened, parse_float=parse_written)
    records = {str(record["id"]): record for record in plain(content["categories"])}
    named = {name: {**records.get(str(number), {}), "id": number} for number, name in categories.items()}
    images = {_id(image["id"]): image for image in plain(content["images"])}
    return ExactCoco(images, content.get("annotations", []), named, categories)


def _id(own: Any) -> CocoId:
    """As `read_coco` has it: a number without a fraction is an integer."""
    return int(own) if isinstance(own, float) else own


def category_ids(names: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Name → id: a category's own; classes that are none count on from there, and from 1 without any."""
    beyond = itertools.count(max((record["id"] for record in known.values()), default=0) + 1)
    return {name: known[name]["id"] if name in known else next(beyond) for name in names}


def write_coco(
    file: Path, images: Sequence[LabelledImage], names: Sequence[str], known: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write a COCO detection file: an image, an annotation and a category a line.

    Images keep the ids that they bring, where all have one; annotations are numbered anew.

    Args:
        file: the JSON.
        images: of the split.
        names: of all classes of the labels.
        known: name → category of the file that the labels come from.
    """
    ids = category_ids(names, known)
    stated: list[Any] = [image.more.get("id") for image in images]
    is_whole = None not in stated and len(set(stated)) == len(stated)
    numbers = stated if is_whole else list(range(1, len(images) + 1))
    records = (
        {
            **image.more,
            "id": number,
            "file_name": image.place,
            "height": image.size_hw[0],
            "width": image.size_hw[1],
        }
        for number, image in zip(numbers, images, strict=True)
    )
    by_id = sorted((number, name) for name, number in ids.items())
    categories = ({**known.get(name, {}), "id": number, "name": name} for number, name in by_id)

    def annotations() -> Iterator[str]:
        count = 0
        for number, image in zip(numbers, images, strict=True):
            for labelled in image.objects:
                count += 1
                fields = labelled.fields()
                del fields["category"]
                named = {"id": str(count), "image_id": strict_json(number), "category_id": str(ids[labelled.name])}
                yield record_text({**named, **fields})

    with atomic_write(file) as opened:
        opened.write(b"{")
        lists = map(strict_json, records), annotations(), map(strict_json, categories)
        for at, (key, lines) in enumerate(zip(("images", "annotations", "categories"), lists, strict=True)):
            opened.write(f"{',' * (at > 0)}\n{json.dumps(key)}: [".encode())
            for count, line in enumerate(lines):
                opened.write(f"{',' * (count > 0)}\n{line}".encode())
            opened.write(b"\n]")
        opened.write(b"\n}\n")
