"""`val: 0.2` in a dataset YAML: whole groups of similar training images are held out, in seeded random order.

Copies and near-duplicates stay on one side of the split, as validating on a copy of a training image says nothing. The
split depends only on file contents and `split_seed`, not on paths: it is equal on all ranks and hosts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.decode import REDUCTIONS, UnusableImage, decode_raw_pixels, image_size
from tessera.data.source.split_files import Listing
from tessera.utils.bit_depth import Pixels, to_uint8
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.files import cached_content, open_plain
from tessera.utils.machine.host import usable_cpus
from tessera.utils.machine.opencv import cv2
from tessera.utils.seeding import ValFraction
from tessera.utils.types import DatasetSpec

GRID = 9  # cells a side of the averaged image
BITS = 2 * GRID * (GRID - 1)
# Maximum number of different bits of similar images. Recompressed copies and images of a burst differ in up to 10 bits,
# images of one scene in 20 and more, any two of coco128 in at least 35. The next value applies if too many are similar.
SIMILAR_BITS = (14, 7, 3, 0)
_DIGEST = 16  # bytes
_ROW = _DIGEST + BITS // 8  # bytes of an image in the cache
_DISTANCES = 1 << 22  # computed at a time

log = logging.getLogger(__name__)


class ImageHashes(NamedTuple):
    """Fingerprints of N images."""

    contents: NDArray[np.uint8]  # (N, 16), hash of each file; of its relative path if it does not decode
    bits: NDArray[np.uint8]  # (N, 18), `difference_hash` of each image; 0 if it does not decode


class TrainValSplit(NamedTuple):
    """A split into train and val."""

    is_val: NDArray[np.bool_]  # (N,)
    groups: NDArray[np.int64]  # (N,), equal for images that stay together
    max_bits: int  # maximum number of different bits between neighbours of a group


def select_images(spec: DatasetSpec, split: str, listing: Listing) -> Listing:
    """Return the images of `split`: all listed ones, unless a fraction of train is held out."""
    if spec.held_out is None or split not in ("train", "val"):
        return listing
    division = _division(spec, listing, spec.held_out)
    if split == "val":
        log.info(_summary(division, spec.held_out))
    part = listing.subset(division.is_val == (split == "val"))
    if split == "val" and division.max_bits < SIMILAR_BITS[0]:
        bits = division.max_bits
        together = f"that differ in at most {bits} of {BITS} bits" if bits else "that are copies"
        warning = (
            f"val: {spec.held_out.fraction:g} of train: too many images look alike, as frames of a still camera do, so "
            f"only those {together} stay on one side and metrics will be too good. Set `val:` to other videos or scenes"
        )
        part.problems = [*part.problems, warning]
    return part


def _division(spec: DatasetSpec, listing: Listing, held_out: ValFraction) -> TrainValSplit:
    """Return the split, from the cache if neither images nor settings have changed."""
    fingerprints = _fingerprints(spec, listing)
    count = len(fingerprints.bits)

    def divided() -> bytes:
        division = hold_out(fingerprints, held_out)
        if division is None:
            raise UserError(
                f"{spec.yaml_path}: val: {held_out.fraction:g}: train has too few different images ({count:,} files) "
                "to hold out that fraction. Set `val:` to a folder of other images."
            )
        return np.concatenate(([division.max_bits], division.is_val, division.groups)).astype("<i8").tobytes()

    state = f"{SIMILAR_BITS} {held_out}\0".encode() + fingerprints.contents.tobytes() + fingerprints.bits.tobytes()
    table = np.frombuffer(cached_content(_cache_file(spec, "division"), state, divided), "<i8").astype(np.int64)
    return TrainValSplit(table[1 : 1 + count].astype(np.bool_), table[1 + count :], int(table[0]))


def _summary(division: TrainValSplit, held_out: ValFraction) -> str:
    """Return a summary of a split: images and groups of each side."""
    _, sizes = np.unique(division.groups, return_counts=True)
    in_val = len(np.unique(division.groups[division.is_val]))
    return (
        f"val: {held_out.fraction:g} of train with split_seed {held_out.seed}: {int(division.is_val.sum()):,} of "
        f"{len(division.is_val):,} images, {in_val:,} of {len(sizes):,} groups (images that differ in at most "
        f"{division.max_bits} of {BITS} bits stay together; the largest group has {int(sizes.max()):,})"
    )


def hold_out(fingerprints: ImageHashes, held_out: ValFraction) -> TrainValSplit | None:
    """Hold out whole groups of similar images, in seeded order, as long as they fit into the fraction.

    If less than half of the fraction fits, images must be more similar to stay together; None if nothing fits.
    """
    count = len(fingerprints.bits)
    wanted = min(max(round(count * held_out.fraction), 1), count - 1)
    salt = (held_out.seed % 2**128).to_bytes(16, "little")
    keys = [hashlib.blake2b(own.tobytes(), digest_size=16, salt=salt).digest() for own in fingerprints.contents]
    # Copies of a file are one image, whether it decodes or not.
    _, copies = np.unique(fingerprints.contents, axis=0, return_inverse=True)
    for max_bits in SIMILAR_BITS:
        groups = group_similar(fingerprints.bits, copies.reshape(-1), max_bits)
        is_val = _choose_groups(groups, keys, wanted)
        if 2 * int(is_val.sum()) >= max(wanted, 1):
            return TrainValSplit(is_val, groups, max_bits)
    return None


def _choose_groups(groups: NDArray[np.int64], keys: Sequence[bytes], most: int) -> NDArray[np.bool_]:
    """Choose whole groups in the order of their smallest keys, at most `most` images in all; bool (N,)."""
    least: dict[int, bytes] = {}
    for own, key in zip(groups.tolist(), keys, strict=True):
        least[own] = min(key, least.get(own, key))
    sizes = np.bincount(groups)
    is_chosen = np.zeros(len(sizes), np.bool_)
    for own in sorted(least, key=lambda own: least[own]):
        if sizes[own] <= most:
            is_chosen[own] = True
            most -= int(sizes[own])
    chosen: NDArray[np.bool_] = is_chosen[groups]
    return chosen


def group_similar(bits: NDArray[np.uint8], copies: NDArray[np.int64], max_bits: int) -> NDArray[np.int64]:
    """Return the group of each of N images, (N,): equal `copies`, and chains of images within `max_bits`."""
    _, first, of = np.unique(copies, return_index=True, return_inverse=True)
    count = len(first)
    labels = np.arange(count)
    known = np.any(bits[first], axis=1)  # images that do not decode have only zeros
    for rows, near in iter_similar_pairs(bits[first], max_bits, np.asarray(known)):
        touched = near.any(1)
        mine, near = rows[touched], near[touched]
        columns = np.flatnonzero(near.any(0))
        near = near[:, columns]
        while len(mine):  # until each connected component has its smallest label
            least = np.minimum(np.where(near, labels[columns], count).min(1), labels[mine])
            reach = np.where(near, least[:, None], count).min(0)
            parent = np.arange(count)
            np.minimum.at(parent, labels[mine], least)
            np.minimum.at(parent, labels[columns], reach)
            while np.any(parent != parent[parent]):
                parent = parent[parent]
            if np.array_equal(parent[labels], labels):
                break
            labels = parent[labels]
    return np.unique(labels, return_inverse=True)[1][of.reshape(-1)]


def iter_similar_pairs(
    bits: NDArray[np.uint8], max_bits: int, known: NDArray[np.bool_] | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield some rows of N hashes, and which hashes up to the last row are within `max_bits` of each; O(N²) time.

    Hashes that are not `known`, bool (N,), are similar to none.
    """
    signs = np.where(np.unpackbits(bits, axis=1), np.float32(1), np.float32(-1))
    if known is not None:
        signs[~known] = 0
    length = max(_DISTANCES // max(len(bits), 1), 1)
    for start in range(0, len(bits), length):
        rows = np.arange(start, min(start + length, len(bits)))
        # A product of signs is the number of bits minus twice the different ones; small integers, so it is exact.
        near = signs[rows] @ signs[: rows[-1] + 1].T >= BITS - 2 * max_bits
        near[np.arange(len(rows)), rows] = False
        yield rows, near


def _cache_file(spec: DatasetSpec, what: str) -> Path:
    key = "\0".join([str(spec.root), *map(str, spec.splits["train"])]).encode("utf-8", "surrogateescape")
    return cache_dir() / "index" / f"{spec.name}-{what}-{hashlib.blake2b(key, digest_size=10).hexdigest()}"


def _fingerprints(spec: DatasetSpec, listing: Listing) -> ImageHashes:
    """Return the fingerprints of all images, from the cache if no file has changed."""
    count = len(listing.images)

    def rows() -> bytes:
        log.info("Comparing %s images for near-duplicates …", f"{count:,}")
        with ThreadPoolExecutor(usable_cpus()) as pool:
            return b"".join(pool.map(lambda place: _row(listing, place), range(count)))

    state = "\0".join([f"{BITS} {cv2.__version__}", *listing.images]).encode("utf-8", "surrogateescape")
    content = cached_content(_cache_file(spec, "fingerprints"), state + listing.image_stats.tobytes(), rows)
    table = np.frombuffer(content, np.uint8).reshape(count, _ROW)
    return ImageHashes(table[:, :_DIGEST], table[:, _DIGEST:])


def _row(listing: Listing, place: int) -> bytes:
    """Return the fingerprint row of an image."""
    path = listing.images[place]
    try:
        height, width = image_size(path, int(listing.image_stats[place, 0]))
        reduction = next((by for by in REDUCTIONS if min(height, width) // by >= 4 * GRID), 1)
        with open_plain(path) as file:
            content = file.read()
        pixels = to_uint8(decode_raw_pixels(np.frombuffer(content, np.uint8), path, reduction), None)
    except (UnusableImage, UserError, OSError):  # training will skip it
        name = listing.shown(path).encode("utf-8", "surrogateescape")
        return hashlib.blake2b(name, digest_size=_DIGEST).digest() + bytes(BITS // 8)
    return hashlib.blake2b(content, digest_size=_DIGEST).digest() + difference_hash(pixels).tobytes()


def difference_hash(pixels: Pixels) -> NDArray[np.uint8]:
    """Return the difference hash of an image (H, W, 3): 144 bits, uint8 (18,), which neighbouring cells are brighter.

    Krawetz (hackerfactor.com, 2013), on a 9 x 9 grid in both directions. Integer sums avoid rounding differences.
    """
    levels = pixels.sum(-1, dtype=np.int64)
    rows, columns = (np.arange(GRID) * side // GRID for side in levels.shape)
    sums = np.add.reduceat(np.add.reduceat(levels, rows, 0), columns, 1)
    heights, widths = (np.diff([*starts, side]) for starts, side in zip((rows, columns), levels.shape, strict=True))
    means = sums / np.outer(heights, widths)
    bits = np.concatenate([(means[:, 1:] > means[:, :-1]).ravel(), (means[1:] > means[:-1]).ravel()])
    return np.packbits(bits)
