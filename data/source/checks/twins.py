"""Twins: pictures of different files that look the same: scaled, saved again, or next to each other in a burst.

Pairs are found by a hash of 144 bits in parts (multi-index hashing, Norouzi et al. 2012): where two hashes differ in at
most 14 bits, they differ in at most one of the 18 bits of some eighth. So each picture is compared with those alone
that share such a part, and a hundred thousand take a minute at most. Then small copies must agree too: on a plain
background most bits say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.checks.looks import Look
from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck, Twins
from tessera.data.source.held_out import ALIKE_BITS, BITS
from tessera.utils.text import counted

_ALIKE = ALIKE_BITS[0]  # bits that twins may differ in
_PARTS = 8
_PART_BITS = BITS // _PARTS
_CROWD = 50  # pictures of an equal part that one is compared with: more are frames of a still camera
_CORRELATION = 0.99  # of the small copies of twins
_FAR = 40.0  # levels that the most different of their points may be apart
_CONTRAST = 2.0  # standard deviation of levels, below which a picture shows nothing to compare
_ROWS = 1 << 16  # pairs compared at a time
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

Pair = tuple[int, int, int]


def check_twins(check: DatasetCheck, looks: Mapping[Part, Sequence[Look | None]]) -> None:
    """Report pictures that look the same but are different files, within a split and between splits.

    Args:
        check: what is added to.
        looks: split → of each of its images that is kept.
    """
    owners = [(part, own) for part, of_images in looks.items() for own, look in enumerate(of_images) if look]
    known = [look for of_images in looks.values() for look in of_images if look]
    if not known:
        return
    paths = [part.listing.images[int(part.places[own])] for part, own in owners]
    order = {part.split: number for number, part in enumerate(looks)}
    for first, second, bits in twins_among(known, [order[part.split] for part, _ in owners]):
        sides = owners[first][0], owners[second][0]
        check.twins.append(
            Twins(
                (sides[0].split, sides[1].split),
                (paths[first], paths[second]),
                (sides[0].listing.shown(paths[first]), sides[1].listing.shown(paths[second])),
                bits,
            )
        )
    for first_split in order:
        for second_split in order:
            pairs = [twins for twins in check.twins if twins.splits == (first_split, second_split)]
            if pairs:
                _report(check, first_split, second_split, pairs)


def _report(check: DatasetCheck, first: str, second: str, pairs: Sequence[Twins]) -> None:
    number = len({twins.paths[1] for twins in pairs})
    looks = f"{counted(number, 'image')} of {second} look{'s' * (number == 1)} nearly the same as"
    example = f"such as {pairs[0].shown[0]} ~ {pairs[0].shown[1]}"
    if first == second:
        check.notes.append(f"{looks} another one of it, {example}")
    elif first == "train":
        check.problems.append(f"{looks} one of train, {example}: what was trained on cannot show how well it detects")
    else:
        check.notes.append(f"{looks} one of {first}, {example}")


def twins_among(looks: Sequence[Look], splits: Sequence[int]) -> list[Pair]:
    """Of each picture the nearest one before it in each split that looks the same, where their files differ.

    A chain of n pictures so has n - 1 pairs, and what is kept does not grow with the pairs that are compared.

    Args:
        looks: of N pictures.
        splits: the number of each one's split, ascending.

    Returns:
        Places of both, the first before the second, and the bits in which they differ; of two splits first, then by
        bits.
    """
    bits = np.stack([look.bits for look in looks])
    small = np.stack([look.small for look in looks]).reshape(len(looks), -1)
    _, contents = np.unique([look.digest.hex() for look in looks], return_inverse=True)
    shows = np.array([look.small.std() >= _CONTRAST for look in looks])
    split_of, count = np.array(splits), max(splits) + 1
    none = np.iinfo(np.int64).max
    best = np.full(len(looks) * count, none)  # bits, then the place of the first
    for first, second in _candidates(bits):
        usable = (contents[first] != contents[second]) & shows[first] & shows[second]
        first, second = first[usable], second[usable]
        distance = _POPCOUNT[bits[first] ^ bits[second]].sum(1, dtype=np.int64)
        keys, values = second * count + split_of[first], distance * len(looks) + first
        better = (distance <= _ALIKE) & (values < best[keys])
        first, second, keys, values = first[better], second[better], keys[better], values[better]
        alike = _alike(small[first], small[second])
        np.minimum.at(best, keys[alike], values[alike])
    found = [
        (int(best[key] % len(looks)), key // count, int(best[key] // len(looks)))
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


def _candidates(bits: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs that share a part of their hashes but for one bit, first < second; some more than once."""
    count = len(bits)
    unpacked = np.unpackbits(bits, axis=1).reshape(count, _PARTS, _PART_BITS).astype(np.int64)
    keys = unpacked @ (1 << np.arange(_PART_BITS))
    for part in range(_PARTS):
        own = keys[:, part]
        order = np.argsort(own, kind="stable")
        ordered = own[order]
        for flipped in (0, *(1 << np.arange(_PART_BITS)).tolist()):
            wanted = own ^ flipped
            start = np.searchsorted(ordered, wanted, "left")
            length = np.minimum(np.searchsorted(ordered, wanted, "right") - start, _CROWD)
            for rows in _slices(length):
                one = np.repeat(np.arange(count)[rows], length[rows])
                within = np.arange(len(one)) - np.repeat(np.cumsum(length[rows]) - length[rows], length[rows])
                other = order[np.repeat(start[rows], length[rows]) + within]
                # All pictures of a crowd see its first ones, which see only each other.
                differ = one != other
                yield np.minimum(one, other)[differ], np.maximum(one, other)[differ]


def _slices(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Rows whose lengths are about `_ROWS` together."""
    ends = np.cumsum(lengths)
    bounds = np.searchsorted(ends, np.arange(_ROWS, int(ends[-1]) + _ROWS, _ROWS), "left") + 1
    begin = 0
    for end in np.unique(np.minimum(bounds, len(lengths))).tolist():
        if end > begin:
            yield slice(begin, end)
            begin = end
