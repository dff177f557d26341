"""Image checks of `--check-data`: decoding, fingerprints, and truncated, rotated, dark, bright, grey, tiny images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.analysis.checks.results import DatasetCheck, SplitData, UnusualImage
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
        levels = decode_raw_pixels(np.frombuffer(raw, np.uint8), path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    return fingerprint_of(levels, raw, rule)


def fingerprint_of(levels: NDArray[np.generic], raw: bytes, rule: PixelRule | None = None) -> Fingerprint:
    """Return the fingerprint of an image with levels (H, W, 3) RGB, decoded from `raw`."""
    pixels, header = to_uint8(levels, rule), read_header(raw)
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
