"""What pictures look like: small copies to compare, and what is unusual about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck, Remark
from tessera.data.source.held_out import GRID, difference_hash
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import DARK, Pixels
from tessera.utils.text import counted, first_of

SMALL = 2 * GRID  # points a side of the copy that is compared
DIM, GLARING = 20, 240  # mean levels of 255, below and above which a picture is remarked on
_TINY = 64  # pixels of the long side, below which it is
_TINT = 3  # levels that the channels of a grey picture may differ by: a JPEG rounds
_FEW = 0.5  # share of a split's pictures from which on a kind is what the set is like, not a remark

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
    TURNED: "EXIF turns or mirrors them when they are decoded: labels must be of the picture as it is shown",
    DARKER: f"the mean level is below {DIM} of 255",
    BRIGHTER: f"the mean level is above {GLARING} of 255",
    DEEP: "their levels become 8 bits by `pixels` of the dataset's YAML",
    GREY: "their three channels are equal, where most pictures have colours",
    TINY: f"the long side is below {_TINY} pixels",
}


class Look(NamedTuple):
    """What a picture looks like.

    Attributes:
        digest: of its file.
        small: uint8 (SMALL, SMALL), a grey copy.
        bits: uint8 (18,), `difference_hash` of it.
        mean, most: level of all its pixels, and of its brightest one, of 255.
        side: pixels of its long side.
        is_cut, is_deep, is_grey: the file breaks off; it has more than 8 bits; it has no colour.
        orientation: as EXIF numbers it.
    """

    digest: bytes
    small: Pixels
    bits: Pixels
    mean: float
    most: int
    side: int
    is_cut: bool
    is_deep: bool
    is_grey: bool
    orientation: int


def look_at(pixels: Pixels, digest: bytes, *, is_cut: bool, is_deep: bool, orientation: int) -> Look:
    """The look of a picture, uint8 (H, W, 3) RGB."""
    coloured = cast(Pixels, cv2.resize(pixels, (2 * SMALL, 2 * SMALL), interpolation=cv2.INTER_AREA))
    levels = coloured.astype(np.int16)
    small = levels.reshape(SMALL, 2, SMALL, 2, 3).mean((1, 3, 4)).round().astype(np.uint8)
    return Look(
        digest,
        small,
        difference_hash(coloured),
        float(levels.mean()),
        int(pixels.max()),
        max(pixels.shape),
        is_cut,
        is_deep,
        bool(np.ptp(levels, axis=2).max() <= _TINT),
        orientation,
    )


def remark_on(check: DatasetCheck, part: Part, looks: Sequence[Look | None]) -> None:
    """Remark on the unusual pictures of a split, and note how many of each kind there are."""
    found: dict[str, list[Remark]] = {}
    for place, look in zip(part.places.tolist(), looks, strict=True):
        if look is not None:
            path = part.listing.images[place]
            for kind, detail in _kinds_of(look):
                found.setdefault(kind, []).append(Remark(kind, part.split, path, part.listing.shown(path), detail))
    known = sum(look is not None for look in looks)
    for kind in (DARKER, BRIGHTER, GREY, TINY):
        if len(found.get(kind, [])) > _FEW * known:
            del found[kind]
    for kind in KINDS:
        remarks = found.get(kind, [])
        check.remarks += remarks
        if remarks and kind not in (CUT, DEEP):  # each has lines of its own
            named = first_of([remark.shown for remark in remarks], 3)
            check.notes.append(f"{part.split}: {counted(len(remarks), 'image')} {kind} ({KINDS[kind]}): {named}")


def _kinds_of(look: Look) -> list[tuple[str, str]]:
    """In which ways a picture is unusual, each with what was measured."""
    of_255 = f"mean level {look.mean:.0f} of 255"
    dark = f", and dark thereby: at most {look.most} of 255" if look.most < DARK else ""
    found = {
        CUT: (look.is_cut, "the end is missing"),
        TURNED: (look.orientation > 1, f"orientation {look.orientation}"),
        DARKER: (look.mean < DIM, of_255),
        BRIGHTER: (look.mean > GLARING, of_255),
        DEEP: (look.is_deep, f"{of_255}{dark}"),
        GREY: (look.is_grey, "no colour"),
        TINY: (look.side < _TINY, f"long side {look.side} pixels"),
    }
    return [(kind, detail) for kind, (is_so, detail) in found.items() if is_so]
