"""Pictures: every one is decoded, and its file's content told from the others'."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck, counted
from tessera.data.source.decode import decode_levels
from tessera.data.source.probe import breaks_off
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.limits import usable_cpus
from tessera.utils.pixels import DARK, PixelRule, brightest_level, to_uint8


class _Decoded(NamedTuple):
    """A decoded image; `brightest` is its largest level of more than 8 bits, and the byte that became of it."""

    digest: bytes
    size_hw: tuple[int, int]
    is_cut: bool
    brightest: tuple[float, int] | None


def check_pictures(check: DatasetCheck, part: Part) -> list[bytes]:
    """Decode every image that is kept; the digest of each file, b"" of one that does not decode."""
    digests: list[bytes] = []
    listing = part.listing
    paths = [listing.images[place] for place in part.places.tolist()]
    deep: list[tuple[float, int]] = []
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoding = pool.map(partial(_decode, rule=part.spec.pixels), paths)
        results = tqdm(decoding, f"Decoding {part.split}", len(paths))
        for path, size, decoded in zip(paths, part.scanned.sizes_hw.tolist(), results, strict=True):
            shown = listing.shown(path)
            if isinstance(decoded, str):
                check.errors.append(f"{shown}: {decoded}")
                digests.append(b"")
                continue
            height, width = decoded.size_hw
            if [height, width] != size:
                stated = f"{size[1]} x {size[0]}"
                check.errors.append(f"{shown}: decodes to {width} x {height} pixels, but its header says {stated}.")
            elif decoded.is_cut:
                check.notes.append(f"{shown}: the end of the file is missing; what decodes is used")
            digests.append(decoded.digest)
            if decoded.brightest is not None:
                deep.append(decoded.brightest)
    level, byte = max(deep, default=(0.0, 0))
    if level > 0 and max(byte for _, byte in deep) < DARK:
        check.notes.append(
            f"{part.split}: of {counted(len(deep), 'image')} with more than 8 bits, the brightest level is {level:g}, "
            f"which becomes {byte} of 255: they come dark. Give `pixels: {{range: [0, {level:g}]}}` in "
            f"{part.spec.yaml_path.name}"
        )
    return digests


def _decode(path: str, rule: PixelRule | None) -> _Decoded | str:
    """Digest of the file, its decoded size and whether its end is missing; or why it cannot be used."""
    try:
        with open_plain(path) as file:
            raw = file.read()
        levels = decode_levels(np.frombuffer(raw, np.uint8), path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    digest = hashlib.blake2b(raw, digest_size=16).digest()
    brightest = None
    if levels.dtype != np.uint8:
        brightest = brightest_level(levels), int(to_uint8(levels, rule).max())
    return _Decoded(digest, (levels.shape[0], levels.shape[1]), breaks_off(raw), brightest)
