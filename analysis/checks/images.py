"""Image checks of `--check-data`: decoding, unusual images, identical files, and near-duplicates.

Near-duplicates are scaled or recompressed copies, or images of a burst. Their difference hashes are within 14 of 144
bits, and their thumbnails correlate, as most bits of a plain background carry no information.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.analysis.checks.results import DatasetCheck, NearDuplicates, SplitData, UnusualImage
from tessera.data.source.decode import decode_raw_pixels
from tessera.data.source.image_header import is_truncated, read_header
from tessera.data.source.messages import most_undecodable
from tessera.utils.bit_depth import DARK, PixelRule, Pixels, max_finite_level, to_uint8
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.host import usable_cpus
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import first_of, plural

GRID = 9  # cells a side of the averaged image
SMALL = 2 * GRID  # side of the thumbnail
DIM, GLARING = 20, 240  # mean level (of 255) of dark and bright images
_TINY = 64  # pixels of the long side
_TINT = 3  # levels by which JPEG rounding separates the channels of a grey image
_FEW = 0.5  # a kind that applies to a larger fraction of a split is not unusual

CUT, TURNED, DARKER, BRIGHTER = "truncated", "rotated by EXIF", "very dark", "very bright"
DEEP, GREY, TINY = "of more than 8 bits", "grey in a colour dataset", "tiny"
KINDS = {
    CUT: "the file is truncated; the decodable part is used",
    TURNED: "EXIF orientation is applied: labels must refer to the image as displayed",
    DARKER: f"mean level below {DIM} of 255",
    BRIGHTER: f"mean level above {GLARING} of 255",
    DEEP: "converted to 8 bits by `pixels` of the dataset's YAML",
    GREY: "three equal channels",
    TINY: f"long side below {_TINY} pixels",
}
# Most different bits of near-duplicates. Recompressed copies and images of a burst differ in up to 10, images of one
# scene in 20 and more, any two of coco128 in at least 35.
_ALIKE = 14
_CROWD = 20  # images of a bucket and a split to compare with; more are frames of a still camera
_CORRELATION = 0.99  # minimum correlation of thumbnails
_FAR = 40.0  # maximum difference of levels in thumbnails
_CONTRAST = 2.0  # minimum standard deviation of levels; plain images are not compared
_SEEN = "metrics on training images are too good"


class Fingerprint(NamedTuple):
    """Content hash and quality measures of one image."""

    size_hw: tuple[int, int]  # of the decoded image
    digest: bytes  # of the file
    small: Pixels  # (SMALL, SMALL), grey thumbnail
    bits: Pixels  # (18,), `difference_hash`
    mean: float  # mean level of 255
    most: int  # largest level of 255
    brightest: float | None  # largest level before conversion to 8 bits; None for 8-bit images
    is_cut: bool  # truncated file
    is_grey: bool
    orientation: int  # EXIF orientation


def check_images(check: DatasetCheck, part: SplitData) -> list[Fingerprint | None]:
    """Decode every image of a split and report unusual ones; None for an image that does not decode."""
    fingerprints: list[Fingerprint | None] = []
    listing = part.listing
    paths = [listing.images[place] for place in part.places.tolist()]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoding = pool.map(partial(_decode, rule=part.spec.pixels), paths)
        results = tqdm(decoding, f"Decoding {part.split}", len(paths), disable=None)
        for path, size, fingerprint in zip(paths, part.scanned.sizes_hw.tolist(), results, strict=True):
            shown = listing.shown(path)
            if isinstance(fingerprint, Fingerprint) and [*fingerprint.size_hw] != size:
                height, width = fingerprint.size_hw
                fingerprint = f"decodes to {width} x {height} pixels, but its header says {size[1]} x {size[0]}"
            if isinstance(fingerprint, str):
                check.problems.append(f"{shown}: {fingerprint.rstrip('.')}; image skipped")
                check.skipped_images.append(shown)
                fingerprints.append(None)
                continue
            if fingerprint.is_cut:
                check.problems.append(f"{shown}: truncated file; the decodable part is used")
            fingerprints.append(fingerprint)
    decodes = np.array([fingerprint is not None for fingerprint in fingerprints], np.bool_)
    undecodable = len(fingerprints) - int(decodes.sum())
    check.images -= undecodable
    check.objects -= int(part.scanned.counts[~decodes].sum())
    if undecodable and undecodable > most_undecodable(len(fingerprints), len(fingerprints)):
        check.errors.append(
            f"{part.split}: {undecodable:,} of {plural(len(fingerprints), 'image')} do not decode, more than training "
            "skips. Restore these files."
        )
    deep = [
        (fingerprint.brightest, fingerprint.most)
        for fingerprint in fingerprints
        if fingerprint is not None and fingerprint.brightest is not None
    ]
    level, byte = max(deep, default=(0.0, 0))
    if level > 0 and max(byte for _, byte in deep) < DARK:
        check.notes.append(
            f"{part.split}: of {plural(len(deep), 'image')} with more than 8 bits, the brightest level is {level:g}, "
            f"which becomes {byte} of 255. Write `pixels: {{range: [0, {level:g}]}}` into {part.spec.yaml_path.name}"
        )
    _report_unusual_images(check, part, fingerprints)
    return fingerprints


def _decode(path: str, rule: PixelRule | None) -> Fingerprint | str:
    """Return the fingerprint of a file, or why it cannot be used."""
    try:
        with open_plain(path) as file:
            raw = file.read()
        levels = decode_raw_pixels(raw, path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    return fingerprint_of(levels, raw, rule)


def fingerprint_of(levels: NDArray[np.generic], raw: bytes, rule: PixelRule | None = None) -> Fingerprint:
    """Return the fingerprint of an image with levels (H, W, 3) RGB, decoded from `raw`."""
    pixels, header = to_uint8(levels, rule), read_header(BytesIO(raw))
    coloured = cast(Pixels, cv2.resize(pixels, (2 * SMALL, 2 * SMALL), interpolation=cv2.INTER_AREA))
    means = coloured.astype(np.int16)
    return Fingerprint(
        size_hw=(pixels.shape[0], pixels.shape[1]),
        digest=hashlib.blake2b(raw, digest_size=16).digest(),
        small=means.reshape(SMALL, 2, SMALL, 2, 3).mean((1, 3, 4)).round().astype(np.uint8),
        bits=difference_hash(coloured),
        mean=float(means.mean()),
        most=int(pixels.max()),
        brightest=None if levels.dtype == np.uint8 else max_finite_level(levels),
        is_cut=is_truncated(raw),
        is_grey=bool(np.ptp(means, axis=2).max() <= _TINT),
        orientation=header.orientation if header else 1,
    )


def difference_hash(small: Pixels) -> NDArray[np.uint8]:
    """Return the difference hash of a copy (36, 36, 3): which of 9 x 9 cells are brighter than the one before.

    144 bits, uint8 (18,), in both directions. Krawetz (hackerfactor.com, 2013).
    """
    cells = small.astype(np.int64).reshape(GRID, 4, GRID, 4, 3).sum((1, 3, 4))
    return np.packbits(np.concatenate([(cells[:, 1:] > cells[:, :-1]).ravel(), (cells[1:] > cells[:-1]).ravel()]))


def _report_unusual_images(check: DatasetCheck, part: SplitData, fingerprints: Sequence[Fingerprint | None]) -> None:
    """Report the unusual images of a split, and their number by kind."""
    found: dict[str, list[UnusualImage]] = {}
    for place, fingerprint in zip(part.places.tolist(), fingerprints, strict=True):
        if fingerprint is not None:
            path = part.listing.images[place]
            for kind, detail in _kinds_of(fingerprint):
                image = UnusualImage(kind, part.split, path, part.listing.shown(path), detail)
                found.setdefault(kind, []).append(image)
    known = sum(fingerprint is not None for fingerprint in fingerprints)
    for kind in (DARKER, BRIGHTER, GREY, TINY):
        if len(found.get(kind, [])) > _FEW * known:
            del found[kind]
    for kind in KINDS:
        images = found.get(kind, [])
        check.unusual_images += images
        if images and kind not in (CUT, DEEP):  # reported above
            named = first_of([image.shown for image in images], 3)
            check.notes.append(f"{part.split}: {plural(len(images), 'image')} {kind} ({KINDS[kind]}): {named}")


def _kinds_of(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """Return in which ways an image is unusual, each with a measurement."""
    of_255 = f"mean level {fingerprint.mean:.0f} of 255"
    dark = f", at most {fingerprint.most} of 255" if fingerprint.most < DARK else ""
    found = {
        CUT: (fingerprint.is_cut, "truncated"),
        TURNED: (fingerprint.orientation > 1, f"orientation {fingerprint.orientation}"),
        DARKER: (fingerprint.mean < DIM, of_255),
        BRIGHTER: (fingerprint.mean > GLARING, of_255),
        DEEP: (fingerprint.brightest is not None, f"{of_255}{dark}"),
        GREY: (fingerprint.is_grey, "no colour"),
        TINY: (max(fingerprint.size_hw) < _TINY, f"long side {max(fingerprint.size_hw)} pixels"),
    }
    return [(kind, detail) for kind, (is_so, detail) in found.items() if is_so]


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
    sets, of_image = part.scanned.unlabelled_sets, part.scanned.set_of_image
    groups = dict[tuple[bool, bool], list[list[int]]]()  # whether labels are equal, and the labelled classes differ
    for own in copies:
        rows = of_image[own] if len(of_image) else np.full(len(own), -1)
        hidden = np.flatnonzero(sets[rows[rows >= 0]].any(0))  # classes that not all copies label
        first, *others = ([row for row in _labels(part, one) if row[1] not in hidden] for one in own)
        key = all(labels == first for labels in others), bool(np.ptp(rows))
        groups.setdefault(key, []).append(own)
    for (is_equal, is_apart), found in sorted(groups.items()):
        which = "and equal labels" if is_equal else "that differ in their labels"
        remedy = "" if is_equal else ": remove all but the correct one"
        if is_apart:
            which, remedy = f"{which}, which label different classes", ": merge their labels into one file"
        example = " = ".join(_shown(part, one) for one in found[0][:3])
        images = plural(len(found), "image")
        lines = check.notes if is_equal else check.problems
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

    A chain of n images so has n - 1 pairs. `splits` is the number of each image's split, ascending. Return (first,
    second, different bits), pairs of two splits first, then by bits.
    """
    bits = np.stack([fingerprint.bits for fingerprint in fingerprints])
    small = np.stack([fingerprint.small for fingerprint in fingerprints]).reshape(len(fingerprints), -1)
    _, contents = np.unique([fingerprint.digest.hex() for fingerprint in fingerprints], return_inverse=True)
    shows = small.std(1) >= _CONTRAST
    split_of, count = np.array(splits), max(splits) + 1
    none = np.iinfo(np.int64).max
    best = np.full(len(fingerprints) * count, none)  # bits * N + index of the first image
    for first, second in _candidates(bits, split_of):
        distance = np.unpackbits(bits[first] ^ bits[second], axis=1).sum(1, dtype=np.int64)
        usable = (distance <= _ALIKE) & (contents[first] != contents[second]) & shows[first] & shows[second]
        usable[usable] = _alike(small[first[usable]], small[second[usable]])
        first, second, distance = first[usable], second[usable], distance[usable]
        np.minimum.at(best, second * count + split_of[first], distance * len(fingerprints) + first)
    found = [
        (int(best[key] % len(fingerprints)), key // count, int(best[key] // len(fingerprints)))
        for key in np.flatnonzero(best < none).tolist()
    ]
    return sorted(found, key=lambda pair: (splits[pair[0]] == splits[pair[1]], pair[2], pair[0], pair[1]))


def _candidates(
    bits: NDArray[np.uint8], splits: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield pairs of images, the first earlier, that may be within `_ALIKE` bits.

    Such hashes have four of 18 bytes in common, and so two in one third of them: images of a bucket agree in these.
    """
    for i, j in itertools.chain.from_iterable(
        itertools.combinations(range(start, start + 6), 2) for start in (0, 6, 12)
    ):
        keys = bits[:, i].astype(np.int64) << 8 | bits[:, j]
        for split in range(int(splits.max()) + 1):
            own, second = np.flatnonzero(splits == split), np.flatnonzero(splits >= split)
            order = own[np.argsort(keys[own], kind="stable")]
            start, end = (np.searchsorted(keys[order], keys[second], side) for side in ("left", "right"))
            end[: len(own)] = np.argsort(order)  # images of the split are compared with earlier ones
            for _ in range(_CROWD):
                end -= 1
                left = end >= start
                start, end, second = start[left], end[left], second[left]
                yield order[end], second


def _alike(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whether thumbnails (n, points) agree, (n,): they correlate, and no point differs by much."""
    a, b = first.astype(np.float32), second.astype(np.float32)
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    product = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    agrees: NDArray[np.bool_] = ((a * b).sum(1) >= _CORRELATION * product) & (np.abs(a - b).max(1, initial=0) <= _FAR)
    return agrees
