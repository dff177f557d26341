"""`conversion.jsonl` beside a converted dataset: what its labels have no place for, and convert.py takes back.

A line with the categories of COCO, then one for each image of which something is kept: its COCO record, and for rows of
its labels, by their text, the whole object as a COCO annotation. Whoever changes a row changes its object: what was
kept for it is used no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.data.conversion.numbers import parse_written
from tessera.data.conversion.objects import Labelled, of_record, plain, record_text
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write, open_plain
from tessera.utils.text import shown, strict_json

NAME = "conversion.jsonl"
SCHEMA = "tessera-conversion 1"


@dataclass(frozen=True)
class Kept:
    """What is kept.

    Attributes:
        categories: name → category of COCO.
        images: place of an image → its COCO record.
        rows: place → text of a row → objects, in their order in the labels.
    """

    categories: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: dict[str, Mapping[str, list[Labelled]]] = field(default_factory=dict)

    def instead(self, place: str, own: Iterable[tuple[str, Labelled]]) -> list[Labelled]:
        """The objects of an image: for each row what is kept for it, else its own; `own` are texts with objects."""
        rows = {text: iter(objects) for text, objects in self.rows.get(place, {}).items()}
        return [next(rows.get(text, iter(())), labelled) for text, labelled in own]


def read_kept(folder: Path) -> Kept:
    """What is kept in a folder; nothing where there is no such file.

    Raises:
        UserError: it is not as it was written.
    """
    path = folder / NAME
    if not path.exists():
        return Kept()
    kept = Kept()
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, 1):
                entry = json.loads(line, parse_float=parse_written)
                if number == 1:
                    kept = Kept({record["name"]: record for record in plain(entry["categories"])})
                    continue
                kept.images[entry["image"]] = plain(entry["more"])
                kept.rows[entry["image"]] = {
                    row: [labelled for record in records if (labelled := of_record(record, record["category"]))]
                    for row, records in entry["rows"].items()
                }
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}:{number}: found {shown(line.decode(errors='replace').strip(), 60)}, expected a line as convert.py "
            "writes it. Convert the labels again, or remove the file to go by the rows alone."
        ) from error
    return kept


def write_kept(folder: Path, categories: Iterable[Mapping[str, Any]], images: Iterable[str]) -> None:
    """Write the file; `images` are its lines, by `kept_line`."""
    with atomic_write(folder / NAME) as file:
        file.write(f"{strict_json({'schema': SCHEMA, 'categories': list(categories)})}\n".encode())
        for line in images:
            file.write(f"{line}\n".encode())


def kept_line(place: str, more: Mapping[str, Any], rows: Mapping[str, Sequence[Labelled]]) -> str:
    """The line of an image."""
    texts = [
        f"{json.dumps(row)}: [{', '.join(record_text(one.fields()) for one in row_)}]" for row, row_ in rows.items()
    ]
    return f'{{"image": {strict_json(place)}, "more": {strict_json(more)}, "rows": {{{", ".join(texts)}}}}}'
