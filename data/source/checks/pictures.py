"""Pictures: every one is decoded, its file's content told from the others', and what it looks like."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from tessera.data.source.checks.looks import Look, look_at, remark_on
from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck
from tessera.data.source.decode import decode_levels
from tessera.data.source.probe import breaks_off, read_header
from tessera.data.source.refusals import most_undecodable
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.limits import usable_cpus
from tessera.utils.pixels import DARK, PixelRule, brightest_level, to_uint8
from tessera.utils.text import counted


class _Decoded(NamedTuple):
    """A decoded image; `brightest` is its largest level of more than 8 bits, and the byte that became of it."""

    size_hw: tuple[int, int]
    brightest: tuple[float, int] | None
    look: Look


def check_pictures(check: DatasetCheck, part: Part) -> list[Look | None]:
    """Decode every image that is kept, and say what it looks like; None of one that does not decode."""
    looks: list[Look | None] = []
    listing = part.listing
    paths = [listing.images[place] for place in part.places.tolist()]
    deep: list[tuple[float, int]] = []
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoding = pool.map(partial(_decode, rule=part.spec.pixels), paths)
        results = tqdm(decoding, f"Decoding {part.split}", len(paths))
        for path, size, decoded in zip(paths, part.scanned.sizes_hw.tolist(), results, strict=True):
            shown = listing.shown(path)
            if not isinstance(decoded, str) and [*decoded.size_hw] != size:
                height, width = decoded.size_hw
                decoded = f"decodes to {width} x {height} pixels, but its header says {size[1]} x {size[0]}"
            if isinstance(decoded, str):
                check.problems.append(f"{shown}: {decoded.rstrip('.')}; the image is left out")
                check.left_out.append(shown)
                looks.append(None)
                continue
            if decoded.look.is_cut:
                check.problems.append(f"{shown}: the end of the file is missing; what decodes is used")
            looks.append(decoded.look)
            if decoded.brightest is not None:
                deep.append(decoded.brightest)
    decodes = np.array([look is not None for look in looks], np.bool_)
    undecodable = len(looks) - int(decodes.sum())
    check.images -= undecodable
    check.objects -= int(part.scanned.counts[~decodes].sum())
    if undecodable and undecodable > most_undecodable(len(looks), len(looks)):
        check.errors.append(
            f"{part.split}: {undecodable:,} of {counted(len(looks), 'image')} do not decode, more than training leaves "
            "out. Restore these files."
        )
    level, byte = max(deep, default=(0.0, 0))
    if level > 0 and max(byte for _, byte in deep) < DARK:
        check.notes.append(
            f"{part.split}: of {counted(len(deep), 'image')} with more than 8 bits, the brightest level is {level:g}, "
            f"which becomes {byte} of 255: they come dark. Give `pixels: {{range: [0, {level:g}]}}` in "
            f"{part.spec.yaml_path.name}"
        )
    remark_on(check, part, looks)
    return looks


def _decode(path: str, rule: PixelRule | None) -> _Decoded | str:
    """What a file holds; or why it cannot be used."""
    try:
        with open_plain(path) as file:
            raw = file.read()
        levels = decode_levels(np.frombuffer(raw, np.uint8), path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    pixels = to_uint8(levels, rule)
    brightest = None if levels.dtype == np.uint8 else (brightest_level(levels), int(pixels.max()))
    header = read_header(raw)
    look = look_at(
        pixels,
        hashlib.blake2b(raw, digest_size=16).digest(),
        is_cut=breaks_off(raw),
        is_deep=levels.dtype != np.uint8,
        orientation=header.orientation if header else 1,
    )
    return _Decoded((levels.shape[0], levels.shape[1]), brightest, look)
