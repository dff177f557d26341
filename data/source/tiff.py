"""TIFF tags (TIFF 6.0; BigTIFF): decoding of layouts that OpenCV misreads, refusal of others, page count.

OpenCV reads all layouts of up to 8 bits except bands without a colour. Of deeper files it takes the samples as they
are, ignoring planes, signs and inverted grey.
"""

from __future__ import annotations

import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.bit_depth import Pixels
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import plural

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WIDTH, HEIGHT = 256, 257
_SUBFILE, _DEPTH, _COLOUR, _BANDS, _PLANES, _EXTRA, _FORM = 254, 258, 262, 277, 284, 338, 339
_STRAIGHT_ALPHA = 2  # OpenCV multiplies 8-bit levels by it
_WHITE_IS_0, _BLACK_IS_0, _RGB = 0, 1, 2
_COLOURED = ((3, _RGB), (4, _RGB), (3, _BLACK_IS_0), (4, _BLACK_IS_0))  # (bands, colour); GDAL omits RGB above 8 bits
_SENSOR = (32803, 34892)  # DNG, of which OpenCV returns sensor levels
_FORMS = {1: "u", 2: "i", 3: "f", 4: "u"}
_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8")
_MOST_PAGES = 10_000  # to count
_WORDS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # kinds of whole numbers


class TiffDirectory(NamedTuple):
    """Image file directory of a TIFF."""

    encoded: bytes | memoryview | mmap  # the file
    at: int  # offset of the directory
    order: str  # byte order for `struct`
    word: str  # format of offsets for `struct`
    entries: dict[int, bytes]  # tag → entry
    following: int  # offset of the next directory; 0 after the last one

    @classmethod
    def read(cls, encoded: bytes | memoryview | mmap, at: int | None = None, most: int = 1 << 62) -> TiffDirectory:
        """Read the directory at `at`, or the first one; only the first `most` entries, which ascend by tag.

        Raises:
            struct.error: the file is truncated.
        """
        order, is_big = "<" if encoded[0] == ord("I") else ">", 43 in bytes(encoded[2:4])
        word = "Q" if is_big else "I"
        if at is None:
            (at,) = struct.unpack_from(order + word, encoded, 8 if is_big else 4)
        at = min(at, len(encoded))  # `struct` raises no struct.error for offsets that exceed a C integer
        (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), encoded, at)
        start, step = (at + 8, 20) if is_big else (at + 2, 12)
        entries: dict[int, bytes] = {}
        for place in range(start, start + step * min(count, most), step):
            entries[struct.unpack_from(order + "H", encoded, place)[0]] = bytes(encoded[place : place + step])
        (following,) = struct.unpack_from(order + word, encoded, min(start + step * count, len(encoded)))
        return cls(encoded, at, order, word, entries, following)

    def numbers(self, tag: int, *default: int, most: int = 1 << 62) -> tuple[int, ...]:
        """Return the first `most` integers of a tag; raises as `read`."""
        if tag not in self.entries:
            return default
        _, kind, count = struct.unpack_from(self.order + "HH" + self.word, self.entries[tag])
        numbers = f"{self.order}{min(count, most)}{_WORDS.get(kind, 'x')}"
        value = self.entries[tag][4 + struct.calcsize(self.order + self.word) :]
        if struct.calcsize(numbers) <= len(value):
            return struct.unpack_from(numbers, value) or default
        (place,) = struct.unpack(self.order + self.word, value)
        return struct.unpack_from(numbers, self.encoded, min(place, len(self.encoded))) or default


def extra_pages_message(encoded: Path | bytes) -> str:
    """Return a message if a decoded TIFF, file or content, has several pages besides thumbnails and masks; else ""."""
    try:
        if isinstance(encoded, Path):
            with open_plain(encoded) as file:
                is_tiff = file.read(4) in TIFF_STARTS
                count = _pages(mmap(file.fileno(), 0, access=ACCESS_READ)) if is_tiff else 1
        else:
            count = _pages(encoded) if encoded[:4] in TIFF_STARTS else 1
    except OSError:  # deleted since it was decoded
        return ""
    if count < 2:
        return ""
    others = "the other is" if count == 2 else f"the other {count - 1:,} are"
    more = " or more" if count == _MOST_PAGES else ""
    return f"the first of {count:,}{more} pages is used, {others} skipped; save each page as a file"


def _pages(encoded: bytes | mmap) -> int:
    """Return the number of pages, at most `_MOST_PAGES`: a crafted file may have overlapping directories."""
    found, seen, at = 0, {0}, None
    try:
        while at not in seen and len(seen) <= _MOST_PAGES:
            directory = TiffDirectory.read(encoded, at, most=1)  # NewSubfileType is the lowest tag
            found += not directory.numbers(_SUBFILE, 0, most=1)[0] & 0b101
            seen.add(directory.at)
            at = directory.following
    except struct.error:  # truncated
        pass
    return found


def read_tiff(encoded: Pixels) -> NDArray[Any] | None:
    """Return the levels (H, W, 3) of a layout that OpenCV misreads; None if OpenCV reads it.

    Raises:
        ValueError: the layout is not supported; the message names it.
    """
    try:
        tags = TiffDirectory.read(encoded.data)
        depths, forms = set(tags.numbers(_DEPTH, 1)), set(tags.numbers(_FORM, 1))
        colour, bands = tags.numbers(_COLOUR, _BLACK_IS_0)[0], tags.numbers(_BANDS, 1)[0]
        is_planar = bands > 1 and tags.numbers(_PLANES, 1)[0] == 2
    except struct.error:
        return None
    depth, form = max(depths), _FORMS.get(max(forms), "")
    is_coloured = colour != _BLACK_IS_0 or bands < 3
    if colour in _SENSOR or (depth <= 8 and form == "u" and is_coloured):
        return None
    if depth in (10, 12, 14) and form == "u" and colour in (_BLACK_IS_0, _RGB) and not is_planar:
        return None
    dtype, layout = f"{form}{depth // 8}", (bands, colour)
    name = (
        f"a TIFF of {plural(bands, 'band')} of {'/'.join(map(str, sorted(depths)))} bits"
        f"{' in planes' if is_planar else ''} whose PhotometricInterpretation is {colour}"
    )
    is_read = (
        len(depths) == len(forms) == 1
        and depth % 8 == 0
        and dtype in _TYPES
        and not is_planar
        and (depth > 8 or is_coloured)
        and (layout == (1, _BLACK_IS_0) or (layout == (1, _WHITE_IS_0) and form == "u") or layout in _COLOURED)
        and (bands < 4 or depth == 16 or (depth == 8 and tags.numbers(_EXTRA, 0)[0] != _STRAIGHT_ALPHA))
    )
    if not is_read:
        raise ValueError(
            f"{name}, expected grey, RGB or RGBA, pixel by pixel, in whole or floating numbers of one type. Save it as "
            "RGB of 8 or 16 bits"
        )
    levels = cv2.imdecode(encoded, cv2.IMREAD_ANYDEPTH | (cv2.IMREAD_COLOR if bands > 1 else 0))
    if levels is None or levels.dtype.itemsize != np.dtype(dtype).itemsize:
        raise ValueError(f"{name} that does not decode: it is damaged, or of an unknown compression")
    samples: NDArray[Any] = np.ascontiguousarray(levels[..., ::-1] if bands > 1 else np.dstack([levels] * 3)).view(
        dtype
    )
    return np.iinfo(dtype).max - samples if colour == _WHITE_IS_0 else samples
