"""Relocation of images that are listed by paths of another machine, by matching path endings."""

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
from tessera.utils.text import first_of, one_line, plural

_SPLIT = re.compile(  # folder names such as val2017, valid, images_train or obj_train_data
    r"(?:(?:data|images?|imgs?|obj)[-_]?)?(train|val|test)(?:id|idation|ing)?(?:[-_]?(?:\d{4}|data|images?|imgs?|set))?",
    re.IGNORECASE,
)
_SHOWN, _LONGEST = 3, 120


def relocate_images(
    split: str, images: Sequence[str], is_missing: Sequence[bool], folders: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Locate images that do not exist at their listed paths.

    A missing image whose folder exists was deleted: it is not searched for, as other folders may reuse its name.

    Args:
        split: split of the images.
        images: listed paths, absolute, or URLs; relative paths start in one of `folders`.
        is_missing: whether each file is missing.
        folders: folders that are searched recursively.

    Returns:
        Listed path → new path, {} unless every image has exactly one match; and a note on the result.
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
    except UserError:  # with an unreadable folder, no match is known to be unique
        return {}, ""
    found = {path: _match_path_end(path, split, folders, by_name) for path in lost}
    places = {path: paths[0] for path, (paths, _) in found.items() if len(paths) == 1}
    if len(places) == len(lost) and not taken & set(places.values()) and len(set(places.values())) == len(lost):
        pair = f"{_shown_path(places[lost[0]], folders)} is used instead of {_shown_path(lost[0], folders)}"
        count = plural(len(lost), "image")
        return places, f"{split}: {count} missing at the listed path, relocated by the end of the path: {pair}"
    if not any(map(any, found.values())):
        return {}, ""
    several = {path: paths for path, paths in found.items() if len(paths[0]) != 1} or found
    named = []
    for path, candidates in several.items():
        own, of_others = (first_of([_shown_path(at, folders) for at in paths], _SHOWN, " or ") for paths in candidates)
        where = own or (f"only {of_others}, in the folder of another split" if of_others else "nowhere")
        named.append(f"{_shown_path(path, folders)} ({where})")
    note = f"{split}: {plural(len(lost), 'image')} missing at the listed path, without a unique match for each"
    return {}, f"{note}: {first_of(named, _SHOWN)}"


def _is_here(path: str, folders: Sequence[str], of_present: set[str]) -> bool:
    """Return whether the folder of a listed image exists in the dataset."""
    above = os.path.dirname(path.replace("\\", "/"))
    return above in of_present or (_inside(above, folders) is not None and os.path.isdir(above))


def _is_spelled_otherwise(path: str) -> bool:
    """Return whether the file exists without backslashes or URL escapes in its path."""
    slashed = path.replace("\\", "/")
    return any(form != path and os.path.isfile(form) for form in (slashed, unquote(slashed)))


def _shown_path(path: str, folders: Sequence[str]) -> str:
    """Return a path for messages, relative to the first folder."""
    return one_line(_inside(path, folders[:1]) or path, _LONGEST)


def _inside(path: str, folders: Sequence[str]) -> str | None:
    """Return the path relative to the longest matching folder; None if it is in none."""
    above = max((folder for folder in folders if f"{path}/".startswith(f"{folder}/")), key=len, default=None)
    return None if above is None else path[len(above) + 1 :]


def _match_path_end(
    listed: str, split: str, folders: Sequence[str], by_name: dict[str, dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the images with the longest matching path ending, and matches in folders of other splits.

    The file name alone may match. The expected split is that of the listed path, else `split`. On a tie, images in a
    folder of the expected split win.
    """
    path = (listed.partition("?")[0] if is_address(listed) else listed).replace("\\", "/")
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
    """Return the split that the folders of a path name last; "" if they name none."""
    named = [match[1].lower() for folder in path.split("/")[:-1] if (match := _SPLIT.fullmatch(folder))]
    return named[-1] if named else ""
