"""Search for the folder that holds the VOC XML files of an image folder; only its path is returned."""

# Paths are strings, as in data/source/split_files.py.
# ruff: noqa: PTH112, PTH113, PTH118, PTH206, PTH208
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tessera.data.source.annotations.label_files import normalized_stem

_IMAGES = ("images", "jpegimages")
_ANNOTATIONS = ("annotations", "annots", "annotation", "xml", "xmls", "labels")


def voc_folder(folder: str, names: Sequence[str]) -> str | None:
    """Return the folder with XML files of the images in `folder`: itself, or Annotations/ beside JPEGImages/; or None.

    `names` are XML paths relative to that folder, such as train/a.xml for images/train/a.jpg.
    """
    return next((place for place in _places(folder) if _has_any(place, names)), None)


def _has_any(place: str, names: Sequence[str]) -> bool:
    """Return whether a folder has any of the files, URL-escaped names included."""
    if not os.path.isdir(place):
        return False
    if any(os.path.isfile(f"{place}/{name}") for name in names):
        return True
    stems = {normalized_stem(Path(name).stem) for name in names}
    folders = {Path(place, name).parent for name in names}
    return any(normalized_stem(path.stem) in stems for folder in folders for path in folder.glob("*.xml"))


def _places(folder: str) -> Iterator[str]:
    """Yield the folder, then candidates beside the last path component named like images, then beside itself."""
    yield folder
    parts = folder.split(os.sep)
    of_images = [at for at, part in enumerate(parts) if part.lower() in _IMAGES][-1:]
    for at in dict.fromkeys([*of_images, len(parts) - 1]):
        parent = os.sep.join(parts[:at])
        if not os.path.isdir(parent):
            continue
        found = {name.lower(): name for name in sorted(os.listdir(parent), reverse=True)}
        for name in _ANNOTATIONS:
            if name in found:
                yield os.sep.join([parent, found[name], *parts[at + 1 :]])
