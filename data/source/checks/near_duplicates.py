"""Duplicate checks of `--check-data`: files of equal content, and near-duplicates, which look the same.

These are scaled, saved again, or next to each other in a burst: their hashes of 144 bits differ in at most 14, and
small copies agree, as on a plain background most bits say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.checks.image_quality import Fingerprint
from tessera.data.source.checks.results import DatasetCheck, NearDuplicates, SplitData
from tessera.data.source.split import SIMILAR_BITS, similar
from tessera.utils.text import counted

_ALIKE = SIMILAR_BITS[0]  # bits that near-duplicates may differ in
_CROWD = 50  # similar images of a split that one is compared with: more are frames of a still camera
_CORRELATION = 0.99  # of the small copies of near-duplicates
_FAR = 40.0  # levels that the most different of their points may be apart
_CONTRAST = 2.0  # standard deviation of levels, below which an image shows nothing to compare
_SEEN = "what was trained on cannot show how well it detects"

Fingerprints = Mapping[SplitData, Sequence[Fingerprint | None]]  # split → of each of its images that is kept


def check_copies(check: DatasetCheck, fingerprints: Fingerprints) -> None:
    """Report files of equal content: metrics on what was trained on mean nothing, and a copy may have other labels."""
    owners: dict[bytes, dict[SplitData, list[int]]] = {}
    for part, of_images in fingerprints.items():
        for own, fingerprint in enumerate(of_images):
            if fingerprint is not None:
                owners.setdefault(fingerprint.digest, {}).setdefault(part, []).append(own)
    parts = list(fingerprints)
    for at, first in enumerate(parts):
        _report_twice(check, first, [own[first] for own in owners.values() if len(own.get(first, ())) > 1])
        for second in parts[at + 1 :]:
            shared = [own for own in owners.values() if first in own and second in own]
            if not shared:
                continue
            number = sum(len(own[second]) for own in shared)
            example = " = ".join(dict.fromkeys(_shown(part, shared[0][part][0]) for part in (first, second)))
            images = counted(len(second.places), "image")
            line = f"{number:,} of the {images} of {second.split} {'is' if number == 1 else 'are'} in {first.split} too"
            if first.split == "train":
                check.problems.append(f"{line}, such as {example}: {_SEEN}")
            else:
                check.notes.append(f"{line}, such as {example}")


def _report_twice(check: DatasetCheck, part: SplitData, copies: list[list[int]]) -> None:
    differ, equal = list[list[int]](), list[list[int]]()
    for own in copies:
        first, *others = (_labels(part, one) for one in own)
        (equal if all(labels == first for labels in others) else differ).append(own)
    for lines, found, which, remedy in (
        (check.problems, differ, "that differ in their labels", ": remove all but the correct one"),
        (check.notes, equal, "and equal labels", ""),
    ):
        if found:
            example = " = ".join(_shown(part, one) for one in found[0][:3])
            images = counted(len(found), "picture")
            lines.append(f"{part.split}: {images} with several files {which}, such as {example}{remedy}")


def _shown(part: SplitData, own: int) -> str:
    return part.listing.shown(part.listing.images[int(part.places[own])])


def _labels(part: SplitData, own: int) -> list[tuple[float, ...]]:
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


def check_near_duplicates(check: DatasetCheck, fingerprints: Fingerprints) -> None:
    """Report images that look the same but are different files, within a split and between splits."""
    owners = [
        (part, own)
        for part, of_images in fingerprints.items()
        for own, fingerprint in enumerate(of_images)
        if fingerprint
    ]
    known = [fingerprint for of_images in fingerprints.values() for fingerprint in of_images if fingerprint]
    if not known:
        return
    order = {part.split: number for number, part in enumerate(fingerprints)}
    for first, second, bits in near_duplicates(known, [order[part.split] for part, _ in owners]):
        (part, own), (other, others) = owners[first], owners[second]
        paths = part.listing.images[int(part.places[own])], other.listing.images[int(other.places[others])]
        shown = _shown(part, own), _shown(other, others)
        check.twins.append(NearDuplicates((part.split, other.split), paths, shown, bits))
    for first_split in order:
        for second_split in order:
            pairs = [pair for pair in check.twins if pair.splits == (first_split, second_split)]
            if not pairs:
                continue
            number = len({pair.paths[1] for pair in pairs})
            line = f"{counted(number, 'image')} of {second_split} look{'s' * (number == 1)} nearly the same as"
            example = f"such as {pairs[0].shown[0]} ~ {pairs[0].shown[1]}"
            if first_split == second_split:
                check.notes.append(f"{line} another one of it, {example}")
            elif first_split == "train":
                check.problems.append(f"{line} one of train, {example}: {_SEEN}")
            else:
                check.notes.append(f"{line} one of {first_split}, {example}")


def near_duplicates(fingerprints: Sequence[Fingerprint], splits: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each image the nearest one before it in each split that looks the same, where their files differ.

    A chain of n images so has n - 1 pairs, and what is kept does not grow with the pairs that are compared.

    Args:
        fingerprints: of N images.
        splits: the number of each one's split, ascending.

    Returns:
        Places of both, the first before the second, and the bits in which they differ; of two splits first, then by
        bits.
    """
    bits = np.stack([fingerprint.bits for fingerprint in fingerprints])
    small = np.stack([fingerprint.small for fingerprint in fingerprints]).reshape(len(fingerprints), -1)
    _, contents = np.unique([fingerprint.digest.hex() for fingerprint in fingerprints], return_inverse=True)
    shows = small.std(1) >= _CONTRAST
    split_of, count = np.array(splits), max(splits) + 1
    none = np.iinfo(np.int64).max
    best = np.full(len(fingerprints) * count, none)  # bits, then the place of the first
    for rows, near in similar(bits, _ALIKE):
        seconds, first = np.nonzero(near)
        second = rows[seconds]
        usable = (first < second) & (contents[first] != contents[second]) & shows[first] & shows[second]
        first, second = first[usable], second[usable]
        keys = second * count + split_of[first]  # ascending
        last = np.searchsorted(keys, keys, "right") - np.arange(len(keys)) <= _CROWD
        first, second, keys = first[last], second[last], keys[last]
        alike = _alike(small[first], small[second])
        first, second, keys = first[alike], second[alike], keys[alike]
        distance = np.unpackbits(bits[first] ^ bits[second], axis=1).sum(1, dtype=np.int64)
        np.minimum.at(best, keys, distance * len(fingerprints) + first)
    found = [
        (int(best[key] % len(fingerprints)), key // count, int(best[key] // len(fingerprints)))
        for key in np.flatnonzero(best < none).tolist()
    ]
    return sorted(found, key=lambda pair: (splits[pair[0]] == splits[pair[1]], pair[2], pair[0], pair[1]))


def _alike(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether small copies (n, points) agree, (n,): in their pattern, and nowhere by much."""
    a, b = first.astype(np.float32), second.astype(np.float32)
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    product = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    agrees: NDArray[np.bool_] = ((a * b).sum(1) >= _CORRELATION * product) & (np.abs(a - b).max(1, initial=0) <= _FAR)
    return agrees
