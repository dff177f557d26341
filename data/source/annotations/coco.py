"""COCO JSON, read as it is; nothing is converted on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tessera.data.source.annotations.coco_annotations import as_json, whole
from tessera.data.source.annotations.yolo_labels import Size
from tessera.utils.errors import UserError
from tessera.utils.files import LONGEST_PATH, is_address, open_plain
from tessera.utils.text import first_line, shown
from tessera.utils.types import CocoId

MOST_OWNERLESS = 100  # annotations to name; with more, the file is cut or of other images
_LARGEST_SIDE = 2**31 - 1  # pixels
_PARTS = "images (id, file_name), annotations (image_id, category_id, bbox) and categories (id, name)"
_TRIED = 100  # names; looking for all of 100,000 in each folder would take seconds


@dataclass
class CocoImage:
    """An image of a COCO file: its id, normal path, stated size (0, 0 without one) and annotations (number, record)."""

    id: CocoId
    path: str
    size_hw: Size
    annotations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class CocoFile:
    """A COCO detection file."""

    images: list[CocoImage]  # in the file's order
    categories: dict[int, str]  # category id → name
    has_annotations: bool  # whether there is such a key; files of images to detect on have none
    ownerless: list[str]  # a message for each annotation that belongs to no image; "" beyond the first hundred
    nowhere: str  # a message where none of its images is where it may be; else ""


def read_coco(path: Path, folders: Sequence[Path]) -> CocoFile:
    """Read a COCO detection file.

    Args:
        path: the JSON.
        folders: where the images may be; the one with the most of them is taken for all, the first of equals.

    Raises:
        UserError: unreadable, not COCO, or an id, a category's name or a file name is there twice.
    """
    content = _load(path)
    try:
        categories = _categories(path, content)
        records = _by_id(path, "images", content)
        names = _file_names(path, records.values())
        sizes = [(_side(path, item, "height"), _side(path, item, "width")) for item in records.values()]
        annotations = list(content.get("annotations", []))
        owners = [item.get("image_id") for item in annotations]
    except KeyError as error:
        raise _not_coco(path, error) from error
    folder = _image_folder(path, names, folders)
    places = _places(path, names, folder or folders[0])
    images = {key: CocoImage(key, place, size) for key, place, size in zip(records, places, sizes, strict=True)}
    ownerless: list[str] = []
    for number, (owner, annotation) in enumerate(zip(owners, annotations, strict=True)):
        if isinstance(owner, (int, float, str)) and owner in images:
            images[cast(CocoId, owner)].annotations.append((number, annotation))
        else:
            message = f"{path}: annotations[{number}] has image_id {as_json(owner)}, but no image has that id."
            ownerless.append(message if len(ownerless) < MOST_OWNERLESS else "")
    tried, named = "\n  ".join(map(str, folders)), next((name for name in names if not is_address(name)), "")
    nowhere = f"{path}: its images, such as {shown(named)}, are in none of\n  {tried}\nMove them to one of these."
    has_annotations = "annotations" in content
    return CocoFile(list(images.values()), categories, has_annotations, ownerless, "" if folder else nowhere)


def read_names(path: Path) -> list[str]:
    """Names of the categories of a COCO file, in the order of their ids; raises as `read_coco`."""
    content = _load(path)
    try:
        return [name for _, name in sorted(_categories(path, content).items())]
    except KeyError as error:
        raise _not_coco(path, error) from error


def _categories(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    """Category id → name, each name once."""
    named = {key: str(item["name"]) for key, item in _by_id(path, "categories", content).items()}
    annotations = content.get("annotations", [])
    used = {own for item in annotations if isinstance(own := item.get("category_id"), (int, float, str))}
    return cast("dict[int, str]", _one_for_each_name(path, named, used))


def _not_coco(path: Path, error: KeyError) -> UserError:
    return UserError(f"{path}: expected a COCO detection file with {_PARTS}; found one without {error}.")


def _load(path: Path) -> dict[str, Any]:
    """The content of a COCO detection file, whose lists hold objects; nothing else is known of these."""
    try:
        with open_plain(path) as file:
            content = json.load(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). Export the file anew.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of more than 4,300 digits, or nested too deep
        raise UserError(f"{path}: expected a COCO JSON ({first_line(error).partition(';')[0]}).") from error
    missing = [key for key in ("images", "categories") if not isinstance(content, dict) or key not in content]
    if missing:
        found = f"no key '{missing[0]}'" if isinstance(content, dict) else shown(content, 60)
        raise UserError(f"{path}: found {found}, expected a COCO detection file with {_PARTS}. Export COCO.")
    for key in ("images", "categories", "annotations"):
        records = content.get(key, [])
        if not isinstance(records, list):
            raise UserError(f"{path}: {key} is {as_json(records)}, expected a list. Export the file anew.")
        for number, record in enumerate(records):
            if not isinstance(record, dict):
                raise UserError(
                    f"{path}: {key}[{number}] is {as_json(record)}, expected an object. Export the file anew."
                )
    return content


def _one_for_each_name(path: Path, categories: Mapping[CocoId, str], used: Collection[Any]) -> dict[CocoId, str]:
    """The categories, of those with one name the one that annotations use: exports add a root, named like its class."""
    kept: dict[str, CocoId] = {}
    for own, name in categories.items():
        earlier = kept.setdefault(name, own)
        if earlier != own and own in used:
            if earlier in used:
                raise UserError(
                    f"{path}: the categories with the ids {earlier} and {own} are both named {shown(name)}, expected a "
                    "name for each. Rename one, or merge the two."
                )
            kept[name] = own
    return {own: name for own, name in categories.items() if kept[name] == own}


def _by_id(path: Path, key: str, content: Mapping[str, Any]) -> dict[CocoId, dict[str, Any]]:
    """The records of a list of the file by their ids: numbers, and text for images."""
    records: dict[CocoId, dict[str, Any]] = {}
    for number, item in enumerate(content[key]):
        own = whole(item["id"]) if key == "categories" else item["id"]
        own = int(own) if isinstance(own, float) and own.is_integer() else own
        if isinstance(own, bool) or not isinstance(own, (int, str) if key == "images" else int):
            raise UserError(f"{path}: {key}[{number}] has the id {shown(item['id'])}, expected an integer.")
        if own in records:
            raise UserError(
                f"{path}: {key}[{number}] has the id {shown(own)}, and so has an earlier one: their annotations cannot "
                "be told apart. Give each an id of its own."
            )
        records[own] = item
    return records


def _file_names(path: Path, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the images' files; LVIS has addresses alone, whose ends are found among the dataset's images."""
    names: list[str] = []
    for number, item in enumerate(records):
        found = item["coco_url"] if "coco_url" in item and "file_name" not in item else item["file_name"]
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


def _places(path: Path, names: Sequence[str], folder: Path) -> list[str]:
    """Paths of the images' files without `.` and `..`, each once; addresses stay, for a message of their own."""
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


def _side(path: Path, item: Mapping[str, Any], key: str) -> int:
    """A stated height or width; 0 where it is unknown: tools write null, 0, and -1 of an image that was not opened."""
    value = whole(item.get(key) or 0)
    if isinstance(value, int) and -1 <= value <= _LARGEST_SIDE:
        return max(value, 0)
    raise UserError(f"{path}: the image {shown(item['id'])} has the {key} {shown(item[key])}, expected pixels.")


def _image_folder(path: Path, names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Where relative names start: the folder with the most of their files; None where no name leads to a file."""
    if not names:
        raise UserError(f"{path}: it lists no images.")
    files = [name for name in names if not is_address(name)]
    relative = [name for name in files if not name.startswith("/")]
    for tried in (relative[:: len(relative) // _TRIED + 1], relative):
        found = [_found(folder, tried) for folder in folders]
        if any(count for count, _ in found):
            return folders[found.index(max(found))]
    # Without a relative name that leads to a file, any folder will do for the others.
    is_there = not files or any(os.path.isfile(name) for name in files if name.startswith("/"))  # noqa: PTH113
    return folders[0] if is_there else None


def _found(folder: Path, names: Sequence[str]) -> tuple[int, int]:
    """How many of the names are files in `folder`, and how many of these do not lead out of it."""
    found = [name for name in names if os.path.isfile(folder / name)]  # noqa: PTH113 - no error for a name too long
    return len(found), sum(not os.path.normpath(name).startswith("..") for name in found)
