"""Images listed by paths of another machine, found by the ends of these below the dataset's own folders."""

# Paths are strings, as in data/source/split_files.py.
# ruff: noqa: PTH112, PTH113, PTH119, PTH120
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import compress, takewhile
from urllib.parse import unquote

from tessera.utils.bit_depth import IMAGE_SUFFIXES
from tessera.utils.errors import UserError
from tessera.utils.files import files_below, is_address
from tessera.utils.text import counted, first_of, one_line

_SPLIT = re.compile(  # a folder's whole name, such as val2017, valid, images_train or obj_train_data
    r"(?:(?:data|images?|imgs?|obj)[-_]?)?(train|val|test)(?:id|idation|ing)?(?:[-_]?(?:\d{4}|data|images?|imgs?|set))?",
    re.IGNORECASE,
)
_SHOWN, _LONGEST = 3, 120


def find_moved(
    split: str, images: Sequence[str], is_missing: Sequence[bool], folders: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Look for images that are not where they are listed.

    An image of a folder that is there was removed, and is not looked for: one of another folder may have its name.

    Args:
        split: whose images they are.
        images: paths as listed, absolute, or addresses; relative ones start in one of `folders`.
        is_missing: whether there is no such file, of each.
        folders: that are searched, with all below.

    Returns:
        Listed path → the image's path, {} unless there is exactly one image for each; what was taken, or why nothing.
    """
    missing = list(compress(images, is_missing))
    taken = set(images).difference(missing) if missing else set[str]()
    of_present = {os.path.dirname(path) for path in taken}
    lost = [path for path in missing if _is_spelled_otherwise(path) or not _is_here(path, folders, of_present)]
    if not lost:
        return {}, ""
    by_name: dict[str, dict[str, str]] = {}  # file name → path of each such image → its path below the folder
    try:
        for folder in dict.fromkeys(folders):
            for path in files_below(folder, IMAGE_SUFFIXES):
                by_name.setdefault(os.path.basename(path), {}).setdefault(path, path[len(folder) + 1 :])
    except UserError:  # a folder that may not be read: nobody can say that an image is there once only
        return {}, ""
    found = {path: _by_end(path, split, folders, by_name) for path in lost}
    places = {path: paths[0] for path, (paths, _) in found.items() if len(paths) == 1}
    if len(places) == len(lost) and not taken & set(places.values()) and len(set(places.values())) == len(lost):
        pair = f"{_said(places[lost[0]], folders)} is used instead of {_said(lost[0], folders)}"
        count = counted(len(lost), "image")
        return places, f"{split}: {count} not where listed, and found by the end of the path: {pair}"
    if not any(map(any, found.values())):
        return {}, ""
    several = {path: paths for path, paths in found.items() if len(paths[0]) != 1} or found
    named = []
    for path, candidates in several.items():
        own, of_others = (first_of([_said(at, folders) for at in paths], _SHOWN, " or ") for paths in candidates)
        where = own or (f"only {of_others}, in the folder of another split" if of_others else "nowhere")
        named.append(f"{_said(path, folders)} ({where})")
    note = f"{split}: {counted(len(lost), 'image')} not where listed, and not each is found once by the end of its path"
    return {}, f"{note}: {first_of(named, _SHOWN)}"


def _is_here(path: str, folders: Sequence[str], of_present: set[str]) -> bool:
    """Whether the folder that an image is listed in is one of this machine's dataset."""
    above = os.path.dirname(_slashed(path))
    return above in of_present or (_inside(above, folders) is not None and os.path.isdir(above))


def _is_spelled_otherwise(path: str) -> bool:
    """Whether there is such a file without the backslashes of Windows or the percent signs of an address."""
    slashed = _slashed(path)
    return any(form != path and os.path.isfile(form) for form in (slashed, unquote(slashed)))


def _said(path: str, folders: Sequence[str]) -> str:
    """A path as messages name it: from the first folder."""
    return one_line(_inside(path, folders[:1]) or path, _LONGEST)


def _slashed(path: str) -> str:
    return path.replace("\\", "/")


def _inside(path: str, folders: Sequence[str]) -> str | None:
    """The path from the longest of the folders that it is in; "" for the folder itself."""
    above = max((folder for folder in folders if f"{path}/".startswith(f"{folder}/")), key=len, default=None)
    return None if above is None else path[len(above) + 1 :]


def _by_end(
    listed: str, split: str, folders: Sequence[str], by_name: dict[str, dict[str, str]]
) -> tuple[list[str], list[str]]:
    """The images whose paths share the longest end with a listed one, and those in the folder of another split.

    The name may be all that is left of a path. The split is that of the listed path, else the one that is listed; of
    equal ends the one in its own folder counts.
    """
    path = _slashed(listed.partition("?")[0] if is_address(listed) else listed)
    path = path if os.path.basename(path) in by_name else unquote(path)
    inside = None if is_address(listed) else _inside(path, folders)
    stated = path if inside is None else inside
    parts, wanted = stated.split("/")[::-1], _split_of(stated) or split
    found: dict[tuple[int, bool], list[str]] = {}
    of_others: list[str] = []
    for place, below in by_name.get(parts[0], {}).items():
        own, ends = _split_of(below), below.split("/")[::-1]
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(parts, ends, strict=False))])
        (of_others if own not in ("", wanted) else found.setdefault((common, own == wanted), [])).append(place)
    return sorted(found[max(found)]) if found else [], sorted(of_others)


def _split_of(path: str) -> str:
    """The split that the folders of a path name last; "" where they name none."""
    named = [match[1].lower() for folder in path.split("/")[:-1] if (match := _SPLIT.fullmatch(folder))]
    return named[-1] if named else ""
