"""Paths of label files: the one of each image, the folder of a folder's VOC XML, label files without an image."""

# Paths are strings, as in data/source/listing.py.
# ruff: noqa: PTH113, PTH118, PTH120, PTH206, PTH208
from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from tessera.data.source.annotations.labels import ANY_CLASS, ParsedLabels, parse_labels
from tessera.data.source.annotations.voc import parse_voc
from tessera.utils.files import open_plain, suffix_of
from tessera.utils.pixels import IMAGE_SUFFIXES, UNREAD_SUFFIXES

ENDLESS = 1 << 24  # a side that no box reaches; float64 keeps what is left of a pixel
NO_CLASS_LIMIT = 2**31 - 1
_IMAGES = ("images", "jpegimages")
_ANNOTATIONS = ("annotations", "annots", "annotation", "xml", "xmls", "labels")


class AnyName(dict[str, int]):
    """Every name that it does not hold is class 0."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 0


def label_path(image: str) -> str:
    """The label file of an image: the last /images/ becomes /labels/, the suffix .txt; else beside the image."""
    return "/labels/".join(image.rpartition(".")[0].rsplit("/images/", 1)) + ".txt"


def any_labels(path: str, ignore: Sequence[str] = ()) -> ParsedLabels:
    """What a label file holds whatever the classes are, and as if the image had no end: nothing is cut off.

    Empty where the file cannot be read. Boxes of VOC are fractions of ENDLESS, and there the objects of classes with a
    name in `ignore` are ignored regions.
    """
    try:
        with open_plain(path) as file:
            raw = file.read()
    except OSError:
        return ParsedLabels()
    if path.endswith(".xml"):
        return parse_voc(raw, (ENDLESS, ENDLESS), AnyName(dict.fromkeys(ignore, ANY_CLASS)))
    return parse_labels(raw, NO_CLASS_LIMIT)


def voc_folder(folder: str, names: Sequence[str]) -> str | None:
    """Return the folder of the XML files of the images in `folder`, such as Annotations/ or annots/ beside it, or None.

    Args:
        folder: of images.
        names: of these images' annotations, from the folder that is looked for: train/a.xml of images/train/a.jpg.
    """
    parts = folder.split(os.sep)
    of_images = [at for at, part in enumerate(parts) if part.lower() in _IMAGES][-1:]
    for at in dict.fromkeys([*of_images, len(parts) - 1]):  # beside the last part named like images, then the folder
        parent = os.sep.join(parts[:at])
        found = {name.lower(): name for name in reversed(_names(parent))}
        for name in _ANNOTATIONS:
            place = os.sep.join([parent, found.get(name, name), *parts[at + 1 :]])
            if name in found and any(os.path.isfile(f"{place}/{own}") for own in names):
                return place
    return None


def unused_labels(labels: Mapping[str, str], known: Collection[str]) -> dict[str, list[str]]:
    """Folder → names of its label files that hold objects and belong to no image, beside those of listed images.

    Args:
        labels: image → its label file.
        known: further label files that are accounted for.
    """
    folders: dict[tuple[str, str], set[str]] = {}  # folder of labels, their suffix → folders of images
    for image, label in labels.items():
        if label:
            folders.setdefault((os.path.dirname(label), suffix_of(label)), set()).add(os.path.dirname(image))
    used = {*labels.values(), *known}
    unused: dict[str, list[str]] = {}
    for (folder, suffix), of_images in sorted(folders.items()):
        found = [name for name in _names(folder) if suffix_of(name) == suffix and f"{folder}/{name}" not in used]
        others = {  # images of other splits, and those that are not read
            name.rpartition(".")[0]
            for place in of_images
            for name in (_names(place) if found else ())
            if suffix_of(name) in IMAGE_SUFFIXES | UNREAD_SUFFIXES
        }
        # Only what holds an object: others are lists of classes, and texts about the dataset.
        found = [
            name for name in found if name.rpartition(".")[0] not in others and any_labels(f"{folder}/{name}").classes
        ]
        if found:
            unused[folder] = found
    return unused


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
