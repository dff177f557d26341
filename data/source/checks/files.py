"""Label files: images without one, and those that belong to no image."""

# Paths are strings, as in data/source/listing.py.
# ruff: noqa: PTH112, PTH119, PTH120, PTH122, PTH208
from __future__ import annotations

import os
from collections.abc import Sequence

from tessera.data.source.checks.part import Part, any_labels
from tessera.data.source.checks.report import DatasetCheck
from tessera.data.source.listing import Listing
from tessera.data.source.refusals import missing_labels, unlabelled, without_objects
from tessera.utils.files import suffix_of
from tessera.utils.text import counted, first_of
from tessera.utils.types import IMAGE_SUFFIXES


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
    if part.split != "train" and not objects and not scanned.unknown and len(missing) < len(scanned.counts):
        check.problems.append(without_objects(part.split, len(scanned.counts)))
    regions = int(((scanned.counts == 0) & (scanned.ignored_counts > 0)).sum())
    without = len(scanned.counts) - objects - regions
    alone = f"{regions:,} with ignored regions alone; " if regions else ""
    check.facts.append(
        f"{part.split}: {counted(len(scanned.counts), 'image')}: {objects:,} with objects; {alone}as background, "
        f"{without - len(missing):,} whose labels hold no object and {len(missing):,} without a label file"
    )


def orphans(listings: Sequence[Listing]) -> list[str]:
    """A line for each folder with label files whose image is not there, beside those of listed images."""
    folders: dict[tuple[str, str], set[str]] = {}  # folder of labels, their suffix → folders of images
    for listing in listings:
        for place, (image, label) in enumerate(zip(listing.images, listing.labels, strict=True)):
            if place not in listing.coco and label:
                key = os.path.dirname(label), suffix_of(label)
                folders.setdefault(key, set()).add(os.path.dirname(image))
    known = {label for listing in listings for label in [*listing.labels, *listing.orphans]}
    lines = []
    for (folder, suffix), image_folders in sorted(folders.items()):
        stems = {
            _stem(name) for images in image_folders for name in _names(images) if suffix_of(name) in IMAGE_SUFFIXES
        }
        # Only what holds an object: others are lists of classes, and texts about the dataset.
        found = [
            path
            for name in _names(folder)
            if suffix_of(name) == suffix and _stem(name) not in stems
            if (path := f"{folder}/{name}") not in known and any_labels(path).classes
        ]
        if found:
            lines.append(
                f"{listings[0].shown(folder)}: {counted(len(found), 'label file')} of no image, so their objects are "
                f"not used: {first_of([os.path.basename(path) for path in found], 3)}"
            )
    return lines


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]
