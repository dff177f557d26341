"""COCO detection files, read without conversion."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tessera.data.source.annotations.coco_annotations import as_json, to_integer
from tessera.data.source.annotations.yolo_labels import Size
from tessera.utils.errors import UserError
from tessera.utils.files import LONGEST_PATH, is_address, open_plain
from tessera.utils.machine.host import available_memory
from tessera.utils.text import first_line, shown
from tessera.utils.types import CocoId

MAX_UNMATCHED = 100  # annotations to name; more mean that the file is truncated or belongs to other images
_LARGEST_SIDE = 2**31 - 1  # pixels
_PARTS = "images (id, file_name), annotations (image_id, category_id, bbox) and categories (id, name)"
_REQUIRED = {"images": ("id",), "categories": ("id", "name"), "annotations": ()}
_TRIED = 100  # names; checking 100,000 in each folder would take seconds


@dataclass
class CocoImage:
    """An image of a COCO file: id, path, stated size ((0, 0) if unknown) and annotations (number, record)."""

    id: CocoId
    path: str
    size_hw: Size
    annotations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class CocoFile:
    """Content of a COCO detection file."""

    images: list[CocoImage]  # in the file's order
    categories: dict[int, str]  # category id → name
    has_annotations: bool  # False for files that only list images
    # A message for each annotation without an image; "" beyond the first MAX_UNMATCHED.
    unmatched_annotations: list[str]
    all_missing: str  # a message if none of the images exists; else ""


def read_coco(path: Path, folders: Sequence[Path]) -> CocoFile:
    """Read a COCO detection file.

    Of `folders`, the one that has the most of the images is used for all, the first on a tie.

    Raises:
        UserError: the file is unreadable, not COCO, or has a duplicate id, category name or file name.
    """
    content = _load(path)
    categories = _categories(path, content)
    records = _records_by_id(path, "images", content)
    names = _file_names(path, records.values())
    sizes = [(_stated_side(path, item, "height"), _stated_side(path, item, "width")) for item in records.values()]
    folder = _image_folder(path, names, folders)
    places = _image_paths(path, names, folder or folders[0])
    images = {key: CocoImage(key, place, size) for key, place, size in zip(records, places, sizes, strict=True)}
    unmatched_annotations: list[str] = []
    for number, annotation in enumerate(content.get("annotations", [])):
        owner = annotation.get("image_id")
        if isinstance(owner, (int, float, str)) and owner in images:
            images[cast(CocoId, owner)].annotations.append((number, annotation))
        else:
            is_shown = len(unmatched_annotations) < MAX_UNMATCHED
            unmatched_annotations.append(_unmatched(path, number, owner, images) if is_shown else "")
    tried, named = "\n  ".join(map(str, folders)), next((name for name in names if not is_address(name)), "")
    all_missing = f"{path}: its images, such as {shown(named)}, are in none of\n  {tried}\nMove them to one of these."
    has_annotations = "annotations" in content
    return CocoFile(
        list(images.values()), categories, has_annotations, unmatched_annotations, "" if folder else all_missing
    )


def read_category_names(path: Path) -> list[str]:
    """Return the category names of a COCO file by ascending id; raises as `read_coco`."""
    return [name for _, name in sorted(_categories(path, _load(path)).items())]


def _categories(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    """Return category id → name, with unique names."""
    named = {key: str(item["name"]) for key, item in _records_by_id(path, "categories", content).items()}
    annotations = content.get("annotations", [])
    used = {own for item in annotations if isinstance(own := item.get("category_id"), (int, float, str))}
    return cast("dict[int, str]", _unique_names(path, named, used))


def _load(path: Path) -> dict[str, Any]:
    """Load the JSON and check that its lists contain objects with the required keys."""
    try:
        # Its values take several times as much memory as its text.
        with open_plain(path, available_memory()) as file:
            content = json.load(file)
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else "too little memory for its values"
        raise UserError(f"{path}: the COCO JSON cannot be read ({reason}).") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). Export the file again.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of more than 4,300 digits, or nested too deep
        raise UserError(f"{path}: expected a COCO JSON ({first_line(error).partition(';')[0]}).") from error
    missing = [key for key in ("images", "categories") if not isinstance(content, dict) or key not in content]
    if missing:
        found = f"no key '{missing[0]}'" if isinstance(content, dict) else shown(content, 60)
        raise UserError(f"{path}: found {found}, expected a COCO detection file with {_PARTS}. Export COCO.")
    for key, required in _REQUIRED.items():
        records = content.get(key, [])
        if not isinstance(records, list):
            raise UserError(f"{path}: {key} is {as_json(records)}, expected a list. Export the file again.")
        for number, record in enumerate(records):
            if not isinstance(record, dict):
                raise UserError(
                    f"{path}: {key}[{number}] is {as_json(record)}, expected an object. Export the file again."
                )
            if lacking := [name for name in required if name not in record]:
                raise UserError(f"{path}: {key}[{number}] has no '{lacking[0]}', expected a COCO file with {_PARTS}.")
    return content


def _unique_names(path: Path, categories: Mapping[CocoId, str], used: Collection[Any]) -> dict[CocoId, str]:
    """Return categories with unique names: of several with one name the one in use, as exports add a root category."""
    id_of: dict[str, CocoId] = {}
    for own, name in categories.items():
        earlier = id_of.setdefault(name, own)
        if earlier != own and own in used:
            if earlier in used:
                raise UserError(
                    f"{path}: the categories with the ids {earlier} and {own} are both named {shown(name)}, expected a "
                    "name for each. Rename one, or merge the two."
                )
            id_of[name] = own
    return {own: name for own, name in categories.items() if id_of[name] == own}


def _records_by_id(path: Path, key: str, content: Mapping[str, Any]) -> dict[CocoId, dict[str, Any]]:
    """Return the records of a list by id: integers, for images also strings."""
    records: dict[CocoId, dict[str, Any]] = {}
    for number, item in enumerate(content[key]):
        own = to_integer(item["id"]) if key == "categories" else item["id"]
        own = int(own) if isinstance(own, float) and own.is_integer() else own
        if isinstance(own, bool) or not isinstance(own, (int, str) if key == "images" else int):
            raise UserError(f"{path}: {key}[{number}] has the id {shown(item['id'])}, expected an integer.")
        if own in records:
            raise UserError(
                f"{path}: {key}[{number}] has the id {shown(own)}, and so has an earlier one: their annotations cannot "
                "be distinguished. Give each an id of its own."
            )
        records[own] = item
    return records


def _file_names(path: Path, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the file names of images; of LVIS records, which have none, the URLs."""
    names: list[str] = []
    for number, item in enumerate(records):
        found = item.get("file_name", item.get("coco_url"))
        name = str(found) if isinstance(found, (str, int, float)) else ""
        try:
            encoded = os.fsencode(name)
            usable = b"\0" not in encoded and 0 < len(encoded) <= LONGEST_PATH
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise UserError(
                f"{path}: images[{number}] has the file_name {as_json(found)}, which no file can have, expected the "
                "path of an image."
            )
        names.append(name)
    return names


def _image_paths(path: Path, names: Sequence[str], folder: Path) -> list[str]:
    """Return normalised, unique paths of the images; URLs stay, as they get their own message."""
    places: dict[str, int] = {}
    for number, name in enumerate(names):
        place = name if is_address(name) else os.path.normpath(folder / name)
        earlier = places.setdefault(place, number)
        if earlier != number:
            raise UserError(
                f"{path}: images[{number}] has the file_name {shown(name)}, and so has images[{earlier}] "
                f"({shown(names[earlier])}) with another id: their annotations belong to one image. Merge the two."
            )
    return list(places)


def _stated_side(path: Path, item: Mapping[str, Any], key: str) -> int:
    """Return a stated height or width; 0 if unknown, which tools write as null, 0 or -1."""
    value = to_integer(item.get(key) or 0)
    if isinstance(value, int) and -1 <= value <= _LARGEST_SIDE:
        return max(value, 0)
    raise UserError(f"{path}: the image {shown(item['id'])} has the {key} {shown(item[key])}, expected pixels.")


def _image_folder(path: Path, names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Return the folder with most of the relative file names; None if no name leads to a file."""
    if not names:
        raise UserError(f"{path}: it lists no images.")
    files = [name for name in names if not is_address(name)]
    relative = [name for name in files if not name.startswith("/")]
    for tried in (relative[:: len(relative) // _TRIED + 1], relative):
        found = [_count_files(folder, tried) for folder in folders]
        if any(count for count, _ in found):
            return folders[found.index(max(found))]
    # Absolute names do not depend on the folder.
    is_there = not files or any(os.path.isfile(name) for name in files if name.startswith("/"))  # noqa: PTH113
    return folders[0] if is_there else None


def _count_files(folder: Path, names: Sequence[str]) -> tuple[int, int]:
    """Return how many names are files in `folder`, and how many of these stay inside it."""
    found = [name for name in names if os.path.isfile(folder / name)]  # noqa: PTH113 - no error for a name too long
    return len(found), sum(not os.path.normpath(name).startswith("..") for name in found)


def _unmatched(path: Path, number: int, owner: Any, images: Mapping[CocoId, CocoImage]) -> str:
    """Return the message about an annotation whose image_id no image has."""
    other = {str(owner), to_integer(owner)} if isinstance(owner, (int, float, str)) else set()
    hint = "; images have it as another type, number or text" if other & images.keys() else ""
    return f"{path}: annotations[{number}] has image_id {as_json(owner)}, but no image has that id{hint}."
