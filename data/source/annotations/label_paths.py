"""Paths of label files: the one of each image, other spellings of its name, and label files without an image."""

# Paths are strings, as in data/source/split_files.py.
# ruff: noqa: PTH119, PTH120, PTH122, PTH208
from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from tessera.data.source.annotations.voc import parse_voc
from tessera.data.source.annotations.yolo_labels import ANY_CLASS, ParsedLabels, parse_labels
from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from tessera.utils.files import open_plain, suffix_of
from tessera.utils.text import counted, first_of, one_line

ENDLESS = 1 << 24  # a side that no box reaches; float64 keeps what is left of a pixel
NO_CLASS_LIMIT = 2**31 - 1


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


def own_labels(
    labels: Mapping[str, str], missing: Sequence[str], accounted_for: Collection[str], shown: Callable[[Path], str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """The label file of each image, also where it spells the image's name otherwise; notes on these; unused ones.

    Args:
        labels: image → where its label file is looked for.
        missing: those of the label files that are not there.
        accounted_for: label files of no image that are named elsewhere.
        shown: a path as messages name it.
    """
    spelled = other_spellings(missing, set(labels.values()))
    notes, unused = [], []
    if spelled:
        pairs = [_pair(shown(Path(found)), os.path.basename(label)) for label, found in spelled.items()]
        notes.append(
            f"{counted(len(pairs), 'label file')} spelled otherwise than the image, and used: {first_of(pairs, 3)}"
        )
    own = {image: spelled.get(label, label) for image, label in labels.items()}
    for folder, names in unused_labels(own, accounted_for).items():
        where, first = shown(Path(folder)), first_of([one_line(name, 60) for name in names], 3)
        count = counted(len(names), "label file")
        unused.append(f"{where}: {count} of no image, so their objects are not used: {first}")
    return own, notes, unused


def _pair(found: str, label: str) -> str:
    """Both spellings of a label file; with escapes where an accent that is taken apart looks like the composed one."""
    pair = f"{found} for {label}"
    is_alike = unicodedata.normalize("NFC", os.path.basename(found)) == unicodedata.normalize("NFC", label)
    return ascii(pair)[1:-1] if is_alike else pair


def other_spellings(missing: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Label file that is not there → the only one whose name is the same with escapes decoded and accents composed.

    Label Studio writes a%2Bb.txt for a+b.jpg, and macOS may have taken an accent apart.

    Args:
        missing: paths of label files.
        known: those of all images, whose files belong to their own.
    """
    folders: dict[str, dict[str, list[str]]] = {}
    for label in dict.fromkeys(missing):
        folders.setdefault(os.path.dirname(label), {}).setdefault(_plain(label), []).append(label)
    found: dict[str, str] = {}
    for folder, wanted in folders.items():
        there: dict[str, list[str]] = {}
        for name in _names(folder):
            if (plain := _plain(f"{folder}/{name}")) in wanted and f"{folder}/{name}" not in known:
                there.setdefault(plain, []).append(f"{folder}/{name}")
        found |= {wanted[plain][0]: files[0] for plain, files in there.items() if len(files) == len(wanted[plain]) == 1}
    return found


def _plain(path: str) -> str:
    """The name of a label file as others may spell it."""
    stem, suffix = os.path.splitext(os.path.basename(path))
    return plain_stem(stem) + suffix.lower()


def plain_stem(stem: str) -> str:
    """The name of an image, without its suffix, with escapes decoded and accents composed."""
    return unicodedata.normalize("NFC", unquote(stem))


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
        others = {  # images of other splits, and those that are not read: they have theirs, as they may spell it
            _plain(os.path.splitext(name)[0] + suffix)
            for place in of_images
            for name in (_names(place) if found else ())
            if suffix_of(name) in IMAGE_SUFFIXES | UNREAD_SUFFIXES and f"{place}/{name}" not in labels
        }
        # Only what holds an object: others are lists of classes, and texts about the dataset.
        found = [name for name in found if _plain(name) not in others and any_labels(f"{folder}/{name}").classes]
        if found:
            unused[folder] = found
    return unused


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
