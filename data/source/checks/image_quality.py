"""Image quality checks of `--check-data`: decoding, content hashes, and unusual images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tessera.data.source.checks.results import DatasetCheck, Remark, SplitData
from tessera.data.source.decode import decode_levels
from tessera.data.source.image_header import breaks_off, read_header
from tessera.data.source.messages import most_undecodable
from tessera.data.source.split import GRID, difference_hash
from tessera.utils.bit_depth import DARK, PixelRule, Pixels, brightest_level, to_uint8
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.machine.resource_limits import usable_cpus
from tessera.utils.text import counted, first_of

SMALL = 2 * GRID  # points a side of the copy that is compared
DIM, GLARING = 20, 240  # mean levels of 255, below and above which an image is remarked on
_TINY = 64  # pixels of the long side, below which it is
_TINT = 3  # levels that the channels of a grey image may differ by: a JPEG rounds
_FEW = 0.5  # share of a split's images from which on a kind is what the set is like, not a remark

CUT, TURNED, DARKER, BRIGHTER, DEEP, GREY, TINY = (
    "cut off",
    "turned by EXIF",
    "very dark",
    "very bright",
    "of more than 8 bits",
    "grey among coloured ones",
    "tiny",
)
KINDS = {
    CUT: "the end of the file is missing; what decodes is used",
    TURNED: "EXIF turns or mirrors them when they are decoded: labels must be of the image as it is shown",
    DARKER: f"the mean level is below {DIM} of 255",
    BRIGHTER: f"the mean level is above {GLARING} of 255",
    DEEP: "their levels become 8 bits by `pixels` of the dataset's YAML",
    GREY: "their three channels are equal, where most images have colours",
    TINY: f"the long side is below {_TINY} pixels",
}


class Fingerprint(NamedTuple):
    """Content and quality of one image."""

    size_hw: tuple[int, int]  # of the decoded image
    digest: bytes  # of its file
    small: Pixels  # (SMALL, SMALL), a grey copy
    bits: Pixels  # (18,), `difference_hash` of it
    mean: float  # level of all its pixels, of 255
    most: int  # level of its brightest pixel, of 255
    brightest: float | None  # its largest level where it has more than 8 bits; else None
    is_cut: bool  # the file breaks off
    is_grey: bool  # it has no colour
    orientation: int  # as EXIF numbers it


def check_images(check: DatasetCheck, part: SplitData) -> list[Fingerprint | None]:
    """Decode every image of a split and report unusual ones; None for an image that does not decode."""
    fingerprints: list[Fingerprint | None] = []
    listing = part.listing
    paths = [listing.images[place] for place in part.places.tolist()]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoding = pool.map(partial(_decode, rule=part.spec.pixels), paths)
        results = tqdm(decoding, f"Decoding {part.split}", len(paths))
        for path, size, fingerprint in zip(paths, part.scanned.sizes_hw.tolist(), results, strict=True):
            shown = listing.shown(path)
            if isinstance(fingerprint, Fingerprint) and [*fingerprint.size_hw] != size:
                height, width = fingerprint.size_hw
                fingerprint = f"decodes to {width} x {height} pixels, but its header says {size[1]} x {size[0]}"
            if isinstance(fingerprint, str):
                check.problems.append(f"{shown}: {fingerprint.rstrip('.')}; the image is left out")
                check.left_out.append(shown)
                fingerprints.append(None)
                continue
            if fingerprint.is_cut:
                check.problems.append(f"{shown}: the end of the file is missing; what decodes is used")
            fingerprints.append(fingerprint)
    decodes = np.array([fingerprint is not None for fingerprint in fingerprints], np.bool_)
    undecodable = len(fingerprints) - int(decodes.sum())
    check.images -= undecodable
    check.objects -= int(part.scanned.counts[~decodes].sum())
    if undecodable and undecodable > most_undecodable(len(fingerprints), len(fingerprints)):
        check.errors.append(
            f"{part.split}: {undecodable:,} of {counted(len(fingerprints), 'image')} do not decode, more than training "
            "leaves out. Restore these files."
        )
    deep = [
        (fingerprint.brightest, fingerprint.most)
        for fingerprint in fingerprints
        if fingerprint is not None and fingerprint.brightest is not None
    ]
    level, byte = max(deep, default=(0.0, 0))
    if level > 0 and max(byte for _, byte in deep) < DARK:
        check.notes.append(
            f"{part.split}: of {counted(len(deep), 'image')} with more than 8 bits, the brightest level is {level:g}, "
            f"which becomes {byte} of 255: they come dark. Give `pixels: {{range: [0, {level:g}]}}` in "
            f"{part.spec.yaml_path.name}"
        )
    _remark(check, part, fingerprints)
    return fingerprints


def _decode(path: str, rule: PixelRule | None) -> Fingerprint | str:
    """What a file holds; or why it cannot be used."""
    try:
        with open_plain(path) as file:
            raw = file.read()
        levels = decode_levels(np.frombuffer(raw, np.uint8), path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    return fingerprint_of(levels, raw, rule)


def fingerprint_of(levels: NDArray[np.generic], raw: bytes, rule: PixelRule | None = None) -> Fingerprint:
    """Return the fingerprint of an image: levels (H, W, 3) RGB of the file `raw`."""
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
        brightest=None if levels.dtype == np.uint8 else brightest_level(levels),
        is_cut=breaks_off(raw),
        is_grey=bool(np.ptp(means, axis=2).max() <= _TINT),
        orientation=header.orientation if header else 1,
    )


def _remark(check: DatasetCheck, part: SplitData, fingerprints: Sequence[Fingerprint | None]) -> None:
    """Remark on the unusual images of a split, and note how many of each kind there are."""
    found: dict[str, list[Remark]] = {}
    for place, fingerprint in zip(part.places.tolist(), fingerprints, strict=True):
        if fingerprint is not None:
            path = part.listing.images[place]
            for kind, detail in _kinds_of(fingerprint):
                found.setdefault(kind, []).append(Remark(kind, part.split, path, part.listing.shown(path), detail))
    known = sum(fingerprint is not None for fingerprint in fingerprints)
    for kind in (DARKER, BRIGHTER, GREY, TINY):
        if len(found.get(kind, [])) > _FEW * known:
            del found[kind]
    for kind in KINDS:
        remarks = found.get(kind, [])
        check.remarks += remarks
        if remarks and kind not in (CUT, DEEP):  # each has lines of its own
            named = first_of([remark.shown for remark in remarks], 3)
            check.notes.append(f"{part.split}: {counted(len(remarks), 'image')} {kind} ({KINDS[kind]}): {named}")


def _kinds_of(fingerprint: Fingerprint) -> list[tuple[str, str]]:
    """In which ways an image is unusual, each with what was measured."""
    of_255 = f"mean level {fingerprint.mean:.0f} of 255"
    dark = f", and dark thereby: at most {fingerprint.most} of 255" if fingerprint.most < DARK else ""
    found = {
        CUT: (fingerprint.is_cut, "the end is missing"),
        TURNED: (fingerprint.orientation > 1, f"orientation {fingerprint.orientation}"),
        DARKER: (fingerprint.mean < DIM, of_255),
        BRIGHTER: (fingerprint.mean > GLARING, of_255),
        DEEP: (fingerprint.brightest is not None, f"{of_255}{dark}"),
        GREY: (fingerprint.is_grey, "no colour"),
        TINY: (max(fingerprint.size_hw) < _TINY, f"long side {max(fingerprint.size_hw)} pixels"),
    }
    return [(kind, detail) for kind, (is_so, detail) in found.items() if is_so]
