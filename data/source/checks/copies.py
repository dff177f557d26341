"""Copies: files of equal content, in two splits or twice in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.data.source.checks.looks import Look
from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck
from tessera.utils.text import counted

Place = tuple[Part, int]  # the image among those of the split that are kept


def check_copies(check: DatasetCheck, looks: Mapping[Part, Sequence[Look | None]]) -> None:
    """Report files of equal content: metrics on what was trained on mean nothing, and a copy may have other labels.

    Args:
        check: what is added to.
        looks: split → of each of its images that is kept.
    """
    owners: dict[bytes, list[Place]] = {}
    for part, of_images in looks.items():
        for own, look in enumerate(of_images):
            if look is not None:
                owners.setdefault(look.digest, []).append((part, own))
    copies = [places for places in owners.values() if len(places) > 1]
    parts = list(looks)
    for at, first in enumerate(parts):
        _report_twice(check, first, [[own for part, own in places if part is first] for places in copies])
        for second in parts[at + 1 :]:
            _report_shared(check, first, second, copies)


def _report_shared(check: DatasetCheck, first: Part, second: Part, copies: list[list[Place]]) -> None:
    shared = 0
    example = ""
    for places in copies:
        own = [next((_shown(part, own) for part, own in places if part is side), "") for side in (first, second)]
        if all(own):
            shared += sum(part is second for part, _ in places)
            example = example or " = ".join(dict.fromkeys(own))
    if shared:
        images = counted(len(second.places), "image")
        line = f"{shared:,} of the {images} of {second.split} {'is' if shared == 1 else 'are'} in {first.split} too"
        if first.split == "train":
            check.problems.append(f"{line}, such as {example}: what was trained on cannot show how well it detects")
        else:
            check.notes.append(f"{line}, such as {example}")


def _report_twice(check: DatasetCheck, part: Part, copies: list[list[int]]) -> None:
    differ, equal = list[list[int]](), list[list[int]]()
    for own in copies:
        if len(own) > 1:
            first, *others = (_labels(part, one) for one in own)
            (equal if all(labels == first for labels in others) else differ).append(own)
    if differ:
        check.problems.append(
            f"{part.split}: {counted(len(differ), 'picture')} with several files that differ in their labels, such as "
            f"{' = '.join(_shown(part, one) for one in differ[0][:3])}: remove all but the correct one"
        )
    if equal:
        check.notes.append(
            f"{part.split}: {counted(len(equal), 'picture')} with several files and equal labels, such as "
            f"{' = '.join(_shown(part, one) for one in equal[0][:3])}"
        )


def _shown(part: Part, own: int) -> str:
    return part.listing.shown(part.listing.images[int(part.places[own])])


def _labels(part: Part, own: int) -> list[tuple[float, ...]]:
    """Class and box of each object of an image, and of each ignored region, in one order whatever that of the rows."""
    scanned = part.scanned
    objects = scanned.counts, scanned.classes, scanned.boxes_xyxy, 0
    ignored = scanned.ignored_counts, scanned.ignored_classes, scanned.ignored_boxes_xyxy, 1
    found: list[tuple[float, ...]] = []
    for counts, classes, boxes, kind in (objects, ignored):
        end = int(counts[: own + 1].sum())
        mine = slice(end - int(counts[own]), end)
        found += [(kind, *row) for row in np.column_stack((classes[mine], boxes[mine])).tolist()]
    return sorted(found)
