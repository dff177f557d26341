"""TIFF writer for tests: sample types, planes, byte orders, compression, BigTIFF, pages."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FORMS = {"u": 1, "i": 2, "f": 3}


def tiff(
    *images: NDArray[np.generic],
    colour: int | None = None,
    planar: bool = False,
    order: str = "<",
    big: bool = False,
    deflate: bool = False,
    rows: int = 1000,
    more: dict[int, Sequence[int]] | None = None,
) -> bytes:
    """A file of `images`, each (H, W) or (H, W, bands); `colour` is PhotometricInterpretation, `more` further tags."""
    word, size, kind = ("Q", 8, 16) if big else ("I", 4, 4)
    mark = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    made = bytearray(mark + (struct.pack(order + "HH", 8, 0) if big else b"") + bytes(size))
    link = len(made) - size
    for image in images:
        levels = image if image.ndim == 3 else image[..., None]
        height, width, bands = levels.shape
        levels = levels.astype(levels.dtype.newbyteorder(order))
        planes = [levels[..., band] for band in range(bands)] if planar else [levels]
        pieces = [plane[row : row + rows].tobytes() for plane in planes for row in range(0, height, rows)]
        pieces = [zlib.compress(piece) for piece in pieces] if deflate else pieces
        places = []
        for piece in pieces:
            places.append(len(made))
            made += piece + bytes(len(piece) % 2)
        colours = (2 if bands >= 3 else 1) if colour is None else colour
        tags: dict[int, Sequence[int]] = {256: [width], 257: [height], 258: [levels.dtype.itemsize * 8] * bands}
        tags |= {259: [8 if deflate else 1], 262: [colours], 273: places, 277: [bands], 278: [min(rows, height)]}
        tags |= {279: [*map(len, pieces)], 284: [2 if planar else 1], 339: [_FORMS[levels.dtype.kind]] * bands}
        extra = bands - (3 if colours == 2 else 1)
        tags |= ({338: [0] * extra} if extra > 0 else {}) | (more or {})
        entries = b""
        for tag, numbers in sorted(tags.items()):
            value = struct.pack(f"{order}{len(numbers)}{word}", *numbers)
            if len(value) > size:
                value, made = struct.pack(order + word, len(made)), made + value
            entries += struct.pack(f"{order}HH{word}", tag, kind, len(numbers)) + value
        made[link : link + size] = struct.pack(order + word, len(made))
        made += struct.pack(order + ("Q" if big else "H"), len(tags)) + entries + bytes(size)
        link = len(made) - size
    return bytes(made)
