"""Duplicate checks of `--check-data`: identical files, and near-duplicates.

Near-duplicates are scaled or recompressed copies, or images of a burst. Their difference hashes are within 14 of 144
bits, and their thumbnails correlate, as most bits of a plain background carry no information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.checks.image_quality import GRID, Fingerprint
from tessera.analysis.checks.results import DatasetCheck, NearDuplicates, SplitData
from tessera.utils.text import plural

_BITS = 2 * GRID * (GRID - 1)
# Most different bits of near-duplicates. Recompressed copies and images of a burst differ in up to 10, images of one
# scene in 20 and more, any two of coco128 in at least 35.
_ALIKE = 14
_DISTANCES = 1 << 22  # computed at a time
_CROWD = 50  # similar images of a split to compare with; more are frames of a still camera
_CORRELATION = 0.99  # minimum correlation of thumbnails
_FAR = 40.0  # maximum difference of levels in thumbnails
_CONTRAST = 2.0  # minimum standard deviation of levels; plain images are not compared
_SEEN = "metrics on training images are too good"

Fingerprints = Mapping[SplitData, Sequence[Fingerprint | None]]  # split → fingerprints of its usable images


def check_copies(check: DatasetCheck, fingerprints: Fingerprints) -> None:
    """Report identical files: copies of training images invalidate metrics, and copies may differ in their labels."""
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
            images = plural(len(second.places), "image")
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
            images = plural(len(found), "image")
            lines.append(f"{part.split}: {images} with several files {which}, such as {example}{remedy}")


def _shown(part: SplitData, own: int) -> str:
    return part.listing.shown(part.listing.images[int(part.places[own])])


def _labels(part: SplitData, own: int) -> list[tuple[float, ...]]:
    """Return class and box of each object and ignored region of an image, in a canonical order."""
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
    """Report similar images of different files, within a split and between splits."""
    known = [(part, own, one) for part, images in fingerprints.items() for own, one in enumerate(images) if one]
    if not known:
        return
    order = {part.split: number for number, part in enumerate(fingerprints)}
    found = near_duplicates([one for _, _, one in known], [order[part.split] for part, _, _ in known])
    for first, second, bits in found:
        (part, own, _), (other, others, _) = known[first], known[second]
        paths = part.listing.images[int(part.places[own])], other.listing.images[int(other.places[others])]
        shown = _shown(part, own), _shown(other, others)
        check.near_duplicates.append(NearDuplicates((part.split, other.split), paths, shown, bits))
    for first_split in order:
        for second_split in order:
            pairs = [pair for pair in check.near_duplicates if pair.splits == (first_split, second_split)]
            if not pairs:
                continue
            number = len({pair.paths[1] for pair in pairs})
            line = (
                f"{plural(number, 'near-duplicate')} in {second_split} of images in {first_split}, such as "
                f"{pairs[0].shown[0]} ~ {pairs[0].shown[1]}"
            )
            if first_split == "train" != second_split:
                check.problems.append(f"{line}: {_SEEN}")
            else:
                check.notes.append(line)


def near_duplicates(fingerprints: Sequence[Fingerprint], splits: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return for each image the most similar earlier image of each split, if their files differ.

    A chain of n images so has n - 1 pairs, and memory does not grow with the number of compared pairs.

    `splits` is the number of each image's split, ascending. Return (first, second, different bits), pairs of two
    splits first, then by bits.
    """
    bits = np.stack([fingerprint.bits for fingerprint in fingerprints])
    small = np.stack([fingerprint.small for fingerprint in fingerprints]).reshape(len(fingerprints), -1)
    _, contents = np.unique([fingerprint.digest.hex() for fingerprint in fingerprints], return_inverse=True)
    shows = small.std(1) >= _CONTRAST
    split_of, count = np.array(splits), max(splits) + 1
    none = np.iinfo(np.int64).max
    best = np.full(len(fingerprints) * count, none)  # bits * N + index of the first image
    for rows, near in _iter_similar(bits):
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


def _iter_similar(bits: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield some rows of N hashes, and which hashes up to the last row are similar to each; O(N²) time."""
    signs = np.where(np.unpackbits(bits, axis=1), np.float32(1), np.float32(-1))
    length = max(_DISTANCES // max(len(bits), 1), 1)
    for start in range(0, len(bits), length):
        rows = np.arange(start, min(start + length, len(bits)))
        # A product of signs is the number of bits minus twice the different ones; small integers, so it is exact.
        near = signs[rows] @ signs[: rows[-1] + 1].T >= _BITS - 2 * _ALIKE
        near[np.arange(len(rows)), rows] = False
        yield rows, near


def _alike(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whether thumbnails (n, points) agree, (n,): they correlate, and no point differs by much."""
    a, b = first.astype(np.float32), second.astype(np.float32)
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    product = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    agrees: NDArray[np.bool_] = ((a * b).sum(1) >= _CORRELATION * product) & (np.abs(a - b).max(1, initial=0) <= _FAR)
    return agrees
