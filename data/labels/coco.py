"""COCO detection files, read without conversion: images, annotations, segmentations, and the ids of results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tessera.data.labels.yolo_labels import Corners, ParsedLabels, Size, clipped_box
from tessera.utils.errors import UserError
from tessera.utils.files import LONGEST_PATH, is_address, open_plain
from tessera.utils.machine.host import available_memory
from tessera.utils.text import first_line, shown
from tessera.utils.types import CocoId, CocoIds

MAX_UNMATCHED = 100  # annotations to name; more mean that the file is truncated or belongs to other images
_LARGEST_SIDE = 2**31 - 1  # pixels
_PARTS = "images (id, file_name), annotations (image_id, category_id, bbox) and categories (id, name)"
_REQUIRED = {"images": ("id",), "categories": ("id", "name"), "annotations": ()}
_TRIED = 100  # names; checking 100,000 in each folder would take seconds
_SCALE = 5  # subpixel grid of the outline
_MOST_REACH = 1 << 16  # pixels a point may lie outside its image
_LONGEST_OUTLINE = 1 << 20  # pixels; longer outlines are ignored, as they take seconds
_BASE, _BITS, _MORE, _SIGN = 48, 5, 0x20, 0x10  # compressed counts: 5 bits of a number per character
_MOST_BITS = 64
Runs = Iterable[tuple[int, int]]  # first pixel and end of each run, column-major
# The names of COCO's 80 classes, in its order (Lin et al. 2014).
# fmt: off
COCO_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on


@dataclass
class CocoImage:
    """An image of a COCO file: id, path, stated size ((0, 0) if unknown) and annotations (number, record)."""

    id: CocoId
    path: str
    size_hw: Size
    annotations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    # Category ids of a federated file such as LVIS's: without an object in the image, and not exhaustively annotated.
    federated: tuple[frozenset[int], frozenset[int]] | None = None

    def labelled_categories(self) -> frozenset[int] | None:
        """Return the ids of the categories whose objects are all annotated; None = of all categories.

        In LVIS (Gupta et al., CVPR 2019) these are the annotated and the negative ones, without the non-exhaustive.
        """
        if self.federated is None:
            return None
        negative, incomplete = self.federated
        annotated = (own for _, annotation in self.annotations if type(own := annotation.get("category_id")) is int)
        return negative.union(annotated) - incomplete


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
    images = {
        key: CocoImage(key, place, size, federated=_federated(path, item))
        for (key, item), place, size in zip(records.items(), places, sizes, strict=True)
    }
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


def _federated(path: Path, item: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[int]] | None:
    """Return `CocoImage.federated` of an image record."""
    keys = "neg_category_ids", "not_exhaustive_category_ids"
    if not any(key in item for key in keys):
        return None
    found = [item.get(key, []) for key in keys]
    for ids in found:
        if not isinstance(ids, list) or not all(isinstance(own, int) for own in ids):
            raise UserError(
                f"{path}: the image {shown(item['id'])} has the ids {as_json(ids)}, expected a list of category ids, "
                "as in LVIS. Remove the key if all objects of the image are annotated."
            )
    negative, incomplete = map(frozenset, found)
    return negative, incomplete


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


def parse_coco(
    annotations: Sequence[tuple[int, dict[str, Any]]],
    size_hw: Size,
    categories: Mapping[int, str],
    class_ids: Mapping[str, int],
) -> ParsedLabels:
    """Parse the annotations of one image; the "line" of an object is its place in `annotations`.

    Boxes (x, y, width, height in pixels) are clipped to the image. A missing or all-zero box is replaced by the box
    around the segmentation. Crowds, and objects of classes below 0 in `class_ids`, become ignored regions. The key
    "ignore" has no effect, as in pycocotools. The parts of a polygon are concatenated.
    """
    labels = ParsedLabels()
    for number, record in annotations:
        name = category_of(record, categories)
        corners = _corners(record, size_hw)
        box = corners if isinstance(corners, str) else clipped_box(corners, size_hw)
        if is_crowd(record) or (name is not None and class_ids.get(name, 0) < 0):
            if isinstance(box, str):
                labels.remarks.append((number, f"{box}; ignored region skipped"))
            elif name is not None and name in class_ids:
                labels.ignore(class_ids[name], box)
        elif isinstance(box, str):
            labels.rejected_rows.append((number, box))
        elif name is None or name not in class_ids:
            unnamed = f"category {shown(to_integer(record.get('category_id')))}"
            labels.unknown.append((number, unnamed if name is None else shown(name)))
        else:
            height, width = size_hw
            parts = polygon_parts(record.get("segmentation"))
            polygon = np.clip(np.concatenate([np.zeros((0, 2)), *parts]) / (width, height), 0.0, 1.0)
            labels.add(number, (class_ids[name], *corners, *polygon.ravel().tolist()), class_ids[name], box, polygon)
    return labels.finish()


def category_of(record: Mapping[str, Any], categories: Mapping[int, str]) -> str | None:
    """Return the name of an annotation's category; None if the file has no such category."""
    category = to_integer(record.get("category_id"))
    return categories.get(category) if isinstance(category, int) else None


def is_crowd(record: Mapping[str, Any]) -> bool:
    """Return whether an annotation is a crowd; text such as "0" or "false" counts by its meaning."""
    value = record.get("iscrowd")
    return value.lower() not in ("", "0", "no", "false", "none") if isinstance(value, str) else bool(value)


def _corners(record: Mapping[str, Any], size_hw: Size) -> Corners | str:
    """Return the corners in pixels of the box, else of the segmentation, or a message if neither is valid."""
    found, segmentation = record.get("bbox"), record.get("segmentation")
    what = f"bbox is {as_json(found)}" if "bbox" in record else "there is no bbox"
    if found in (None, [], [0, 0, 0, 0]) and segmentation:
        height, width = size_hw
        return mask_box(segmentation, size_hw) or (
            f"{what}, and the segmentation is {shown(segmentation, 60)}, expected polygons ([[x1, y1, x2, y2, …]]) or "
            f"run lengths of the size [{height}, {width}] that cover a pixel of the image"
        )
    box = numbers(found)
    if box is None or len(box) != 4 or box[2] <= 0 or box[3] <= 0:
        return f"{what}, expected x, y, width, height in pixels, the last two above 0"
    return box[0], box[1], box[0] + box[2], box[1] + box[3]


def to_integer(value: Any) -> Any:
    """Return text of digits (12 or 12.0) and floats without a fraction as int; anything else unchanged."""
    if isinstance(value, str) and value.isascii() and len(value) < 20:
        text = value.removesuffix(".0")
        return int(text) if text.removeprefix("-").isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_json(value: Any) -> str:
    """Return a value of a JSON file as messages show it."""
    return "null" if value is None else shown(value, 60)


def numbers(value: Any) -> list[float] | None:
    """Return a list of finite numbers; None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
        return None
    try:
        numbers = [float(item) for item in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def polygon_parts(segmentation: Any) -> list[NDArray[np.float64]]:
    """Return the parts (k, 2) of a polygon in pixels; [] for a mask or anything else."""
    parts = [numbers(part) for part in segmentation] if isinstance(segmentation, list) else []
    return [np.array(part).reshape(-1, 2) for part in parts if part and len(part) >= 6 and len(part) % 2 == 0]


def mask_box(segmentation: Any, size_hw: Size) -> Corners | None:
    """Return the corners of the box around a mask's pixels, from polygons or run lengths; None for an empty mask.

    The size of run lengths may differ by one from the image's; they are decoded with their own size.
    """
    if isinstance(segmentation, dict):
        size = numbers(segmentation.get("size")) or []
        if len(size) != 2 or np.abs(np.subtract(size, size_hw)).max() > 1:
            return None
        own_hw = int(size[0]), int(size[1])
        return _around([_runs_of_counts(segmentation.get("counts"), own_hw)], own_hw)
    reach = max(size_hw) + _MOST_REACH
    parts = [part for part in polygon_parts(segmentation) if np.abs(part).max() <= reach and _is_short(part)]
    return _around([_runs_of_polygon(part, size_hw) for part in parts], size_hw)


def _is_short(part: NDArray[np.float64]) -> bool:
    return bool(np.abs(part - np.roll(part, -1, 0)).max(1).sum() <= _LONGEST_OUTLINE)


def _around(masks: Iterable[Runs], size_hw: Size) -> Corners | None:
    height, width = size_hw
    left, top, right, bottom = width, height, 0, 0
    for first, end in (run for runs in masks for run in runs):
        if first == end:
            continue
        columns, rows = (first // height, (end - 1) // height), (first % height, (end - 1) % height)
        low, high = rows if columns[0] == columns[1] else (0, height - 1)
        left, right = min(left, columns[0]), max(right, columns[1] + 1)
        top, bottom = min(top, low), max(bottom, high + 1)
    return (left, top, right, bottom) if right else None


def _runs_of_counts(counts: Any, size_hw: Size) -> Runs:
    """Return the runs of a mask from run lengths, which begin outside it; none if they do not add up to its size."""
    lengths = _decoded(counts) if isinstance(counts, str) else [int(length) for length in numbers(counts) or []]
    if sum(lengths) != math.prod(size_hw) or min(lengths, default=0) < 0:
        return []
    ends = [0, *accumulate(lengths)]
    return list(pairwise(ends))[1::2]


def _decoded(text: str) -> list[int]:
    """Return the run lengths of compressed counts, [] if one is too long; from the fourth on they are differences."""
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - _BASE
        value |= (code & (_MORE - 1)) << shift
        shift += _BITS
        if shift > _MOST_BITS:
            return []
        if not code & _MORE:
            value -= (1 << shift) if code & _SIGN else 0
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    return lengths


def _runs_of_polygon(points: NDArray[np.float64], size_hw: Size) -> Runs:
    """Return the runs inside a polygon (k, 2): where its outline on the subpixel grid crosses the column centres."""
    height, width = size_hw
    corners = np.trunc(points * _SCALE + 0.5).astype(np.int64)
    outline = np.concatenate([_edge(a, b) for a, b in zip(corners, np.roll(corners, -1, 0), strict=True)])
    before, after = outline[:-1], outline[1:]
    turns = before[:, 0] != after[:, 0]
    columns = (np.minimum(before, after)[turns, 0] + 0.5) / _SCALE - 0.5
    rows = np.ceil(np.clip((np.minimum(before, after)[turns, 1] + 0.5) / _SCALE - 0.5, 0, height))
    inside = (columns == np.floor(columns)) & (columns >= 0) & (columns <= width - 1)
    crossings = np.sort((columns * height + rows)[inside]).astype(np.int64).tolist()
    return zip(crossings[::2], crossings[1::2], strict=False)


def _edge(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the subpixel points (n, 2) of an edge, one per step of its longer axis."""
    reach = np.abs(end - start)
    axis = 0 if reach[0] >= reach[1] else 1
    is_back = start[axis] > end[axis]
    low, high = (end, start) if is_back else (start, end)
    steps = np.arange(reach[axis] + 1)
    line = np.empty((len(steps), 2), np.int64)
    slope = (high[1 - axis] - low[1 - axis]) / reach[axis] if reach[axis] else 0.0
    line[:, axis] = low[axis] + steps
    line[:, 1 - axis] = np.trunc(low[1 - axis] + slope * steps + 0.5)
    return line[::-1] if is_back else line


def result_ids(
    images: Sequence[CocoId],
    categories: Sequence[Mapping[int, str]],
    names: Sequence[str],
    single: bool,
    ignore: Sequence[str],
) -> CocoIds | None:
    """Return the ids that results are written with; None if files of one split use an id for two things.

    A class without a category of its name gets an id above all others.

    Args:
        images: ids of the images of a split.
        categories: category id → name, of each COCO file.
        names: the category that each class is named after.
        single: all classes count as one, with the id of the first trained category.
        ignore: names of the classes that are not trained.
    """
    by_name: dict[str, int] = {}
    by_id: dict[int, str] = {}
    for number, name in (item for of_file in categories for item in of_file.items()):
        if by_id.setdefault(number, name) != name or (len(categories) > 1 and by_name.get(name, number) != number):
            return None
        by_name.setdefault(name, number)
    if len(set(images)) < len(images) or not by_id:
        return None
    beyond = max(by_id) + 1
    own = [by_name.get(name, beyond + number) for number, name in enumerate(names)]
    if single:
        own = [min((number for number, name in by_id.items() if name not in ignore), default=beyond)]
    return CocoIds(tuple(images), tuple(own))
