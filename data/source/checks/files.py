"""Label files: images without one, and those that belong to no image."""

# Paths are strings, as in data/source/listing.py.
# ruff: noqa: PTH112, PTH119, PTH120, PTH122, PTH208
from __future__ import annotations

import os
from collections.abc import Sequence

from tessera.data.source.annotations.labels import parse_labels
from tessera.data.source.annotations.voc import parse_voc
from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck, counted
from tessera.data.source.refusals import missing_labels, unlabelled, without_objects
from tessera.data.source.scan import NO_CLASS_LIMIT, AnyName
from tessera.utils.files import open_plain, suffix_of
from tessera.utils.text import first_of
from tessera.utils.types import IMAGE_SUFFIXES

_ANY_SIZE = 1 << 24


def check_label_files(check: DatasetCheck, part: Part) -> None:
    """Count the images of a split by whether they have labels, and report those that may have lost theirs."""
    listing, scanned = part.listing, part.scanned
    missing = unlabelled(listing, scanned)
    lost = missing_labels(part.split, listing, scanned)
    if part.split == "val" and missing and len(missing) == len(scanned.counts):
        lost = [f"val: none of its {counted(len(missing), 'image')} has a label file, such as {missing[0]}"]
    check.problems += lost
    if missing and not lost:
        check.notes.append(
            f"{part.split}: {counted(len(missing), 'image')} without a label file, used as background: "
            f"{first_of(missing, 3)}"
        )
    objects = int((scanned.counts > 0).sum())
    if part.split != "train" and not objects and len(missing) < len(scanned.counts):
        check.problems.append(without_objects(part.split, len(scanned.counts)))
    without = len(scanned.counts) - objects
    check.facts.append(
        f"{part.split}: {counted(len(scanned.counts), 'image')}: {objects:,} with objects; as background, "
        f"{without - len(missing):,} whose labels hold no object and {len(missing):,} without a label file"
    )


def check_orphans(check: DatasetCheck, parts: Sequence[Part]) -> None:
    """Report label files whose image is not there: beside the label files of listed images, by their names."""
    folders: dict[tuple[str, str], set[str]] = {}  # folder of labels, their suffix → folders of images
    for part in parts:
        for place, (image, label) in enumerate(zip(part.listing.images, part.listing.labels, strict=True)):
            if place not in part.listing.coco and label:
                key = os.path.dirname(label), suffix_of(label)
                folders.setdefault(key, set()).add(os.path.dirname(image))
    known = {label for part in parts for label in [*part.listing.labels, *part.listing.orphans]}
    for (folder, suffix), image_folders in sorted(folders.items()):
        stems = {
            _stem(name) for images in image_folders for name in _names(images) if suffix_of(name) in IMAGE_SUFFIXES
        }
        orphans = [
            path
            for name in _names(folder)
            if suffix_of(name) == suffix and _stem(name) not in stems
            if (path := f"{folder}/{name}") not in known and _has_objects(path)
        ]
        if orphans:
            listing = parts[0].listing
            check.problems.append(
                f"{listing.shown(folder)}: {counted(len(orphans), 'label file')} of no image, so their objects are not "
                f"used: {first_of([os.path.basename(path) for path in orphans], 3)}"
            )


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _has_objects(path: str) -> bool:
    """Whether a file is one of labels with an object, not a list of classes or a text about the dataset."""
    try:
        with open_plain(path) as file:
            raw = file.read()
    except OSError:
        return False
    if path.endswith(".xml"):
        found = parse_voc(raw, (_ANY_SIZE, _ANY_SIZE), AnyName())
    else:
        found = parse_labels(raw, NO_CLASS_LIMIT)
    return len(found.classes) > 0
