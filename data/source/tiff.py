"""TIFF files by their tags (TIFF 6.0; BigTIFF): pixels of the layouts that OpenCV takes for others, or why not.

Of up to 8 bits OpenCV reads all but bands without a colour. Of more it takes samples as they come, whatever the tags
say of planes, signs and the direction of grey. Such a file gets a directory that OpenCV reads right, one for each
plane, so that whatever compresses it is libtiff's; the samples then get their type.
"""

from __future__ import annotations

import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import Pixels

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
WIDTH, HEIGHT = 256, 257
_SUBFILE, _DEPTH, _COLOUR, _BANDS, _PLANES, _EXTRA, _FORM = 254, 258, 262, 277, 284, 338, 339
_PIECES = (273, 279, 324, 325)  # places and lengths of strips and of tiles; those of one plane after another's
# What else says how to read samples: compression, bit order, orientation, rows, predictor, tiles, JPEG tables.
_KEPT = (WIDTH, HEIGHT, 259, 266, 274, 278, 317, 322, 323, 347, *_PIECES)
_WHITE_IS_0, _BLACK_IS_0, _RGB = 0, 1, 2
_SENSOR = (32803, 34892)  # of DNG: OpenCV gives the levels of the sensor
_UNSIGNED, _FLOATING = "u", "f"
_FORMS = {1: _UNSIGNED, 2: "i", 3: _FLOATING, 4: _UNSIGNED}
_TYPES = ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")
_MOST_PAGES = 10_000  # to count
_WORDS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # kinds of whole numbers


class TiffDirectory(NamedTuple):
    """What a TIFF file says of one of its images.

    Attributes:
        encoded: the file.
        at: where the directory is.
        order: of its bytes, as `struct` names it.
        word: of its places, as `struct` names it: 4 bytes, 8 in BigTIFF.
        entries: tag → its entry.
        following: where the next directory is; 0 after the last one.
    """

    encoded: bytes | memoryview | mmap
    at: int
    order: str
    word: str
    entries: dict[int, bytes]
    following: int

    @classmethod
    def read(cls, encoded: bytes | memoryview | mmap, at: int | None = None, most: int = 1 << 62) -> TiffDirectory:
        """The directory at `at`, or the first one, and the first `most` of its entries, which ascend by tag.

        Raises:
            struct.error: the file ends before.
        """
        order, is_big = "<" if encoded[0] == ord("I") else ">", 43 in bytes(encoded[2:4])
        word = "Q" if is_big else "I"
        if at is None:
            (at,) = struct.unpack_from(order + word, encoded, 8 if is_big else 4)
        at = min(at, len(encoded))  # a place beyond the end may be too large for `struct` to say so
        (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), encoded, at)
        start, step = (at + 8, 20) if is_big else (at + 2, 12)
        entries: dict[int, bytes] = {}
        for place in range(start, start + step * min(count, most), step):
            entries[struct.unpack_from(order + "H", encoded, place)[0]] = bytes(encoded[place : place + step])
        (following,) = struct.unpack_from(order + word, encoded, min(start + step * count, len(encoded)))
        return cls(encoded, at, order, word, entries, following)

    def numbers(self, tag: int, *default: int, most: int = 1 << 62) -> tuple[int, ...]:
        """The whole numbers of a tag, the first `most` of them.

        Raises:
            struct.error: the file ends before.
        """
        if tag not in self.entries:
            return default
        _, kind, count = struct.unpack_from(self.order + "HH" + self.word, self.entries[tag])
        numbers = f"{self.order}{min(count, most)}{_WORDS.get(kind, 'x')}"
        value = self.entries[tag][4 + struct.calcsize(self.order + self.word) :]
        if struct.calcsize(numbers) <= len(value):
            return struct.unpack_from(numbers, value) or default
        (place,) = struct.unpack(self.order + self.word, value)
        return struct.unpack_from(numbers, self.encoded, min(place, len(self.encoded))) or default

    def with_tags(self, changed: dict[int, tuple[int, ...]]) -> Pixels:
        """The file with a directory of its own at the end, which has these tags and those that say how to decode."""
        is_big, size = self.word == "Q", struct.calcsize(self.order + self.word)
        places = np.frombuffer(self.encoded, np.uint8)
        start = len(places) + len(places) % 2
        entries = {tag: entry for tag, entry in self.entries.items() if tag in _KEPT}
        beyond = start + (8 if is_big else 2) + (20 if is_big else 12) * len({*entries, *changed}) + size
        arrays = b""
        for tag, numbers in changed.items():
            value = struct.pack(f"{self.order}{len(numbers)}{self.word}", *numbers)
            if len(value) > size:
                value, arrays = struct.pack(self.order + self.word, beyond + len(arrays)), arrays + value
            entries[tag] = struct.pack(f"{self.order}HH{self.word}", tag, 16 if is_big else 4, len(numbers)) + value
        directory = struct.pack(self.order + ("Q" if is_big else "H"), len(entries))
        directory += b"".join(entries[tag] for tag in sorted(entries)) + bytes(size) + arrays
        padding = bytes(len(places) % 2)
        made = np.concatenate((places, np.frombuffer(padding + directory, np.uint8)))
        made[size : 2 * size] = np.frombuffer(struct.pack(self.order + self.word, start), np.uint8)
        return made


def unread_pages(encoded: Path | bytes) -> str:
    """A remark where a TIFF file holds several images, smaller copies and masks not counted; else "".

    Args:
        encoded: the file, or its content; one that decoded.
    """
    try:
        if isinstance(encoded, Path):
            with open_plain(encoded) as file:
                is_tiff = file.read(4) in TIFF_STARTS
                count = _pages(mmap(file.fileno(), 0, access=ACCESS_READ)) if is_tiff else 1
        else:
            count = _pages(encoded) if encoded[:4] in TIFF_STARTS else 1
    except OSError:  # gone since it was decoded
        return ""
    others = "the other is" if count == 2 else f"the other {count - 1:,} are"
    count_or_more = f"{count:,}{' or more' * (count == _MOST_PAGES)}"
    return (
        f"the first of {count_or_more} pages is used, {others} left out; save each page as a file" if count > 1 else ""
    )


def _pages(encoded: bytes | mmap) -> int:
    """Return the number of pages, at most `_MOST_PAGES`: a crafted file may have overlapping directories."""
    found, seen, at = 0, {0}, None
    try:
        while at not in seen and len(seen) <= _MOST_PAGES:
            directory = TiffDirectory.read(encoded, at, most=1)  # the tag that counts here is the lowest
            found += not directory.numbers(_SUBFILE, 0, most=1)[0] & 0b101
            seen.add(directory.at)
            at = directory.following
    except struct.error:  # the rest is missing
        pass
    return found


def read_tiff(encoded: Pixels) -> NDArray[Any] | None:
    """Levels (H, W, 3) of a file that OpenCV would take for another one; None where it reads it right.

    Raises:
        ValueError: nothing here reads this layout; the message names it.
    """
    try:
        tags = TiffDirectory.read(encoded.data)
        depths, forms = set(tags.numbers(_DEPTH, 1)), set(tags.numbers(_FORM, 1))
        colour, bands = tags.numbers(_COLOUR, _BLACK_IS_0)[0], tags.numbers(_BANDS, 1)[0]
        is_planar = bands > 1 and tags.numbers(_PLANES, 1)[0] == 2
        depth, form = max(depths), _FORMS.get(max(forms), "")
        is_plain = form == _UNSIGNED and (colour != _BLACK_IS_0 or bands < 3)
        if colour in _SENSOR or (depth <= 8 and is_plain):
            return None
        if depth in (10, 12, 14) and form == _UNSIGNED and colour in (_BLACK_IS_0, _RGB) and not is_planar:
            return None
        name = f"a TIFF of {bands} band{'s' * (bands != 1)} of {'/'.join(map(str, sorted(depths)))} bits"
        if colour not in (_WHITE_IS_0, _BLACK_IS_0, _RGB):
            raise ValueError(f"{name} whose PhotometricInterpretation is {colour}, expected grey or RGB")
        is_white_0 = colour == _WHITE_IS_0
        dtype = f"{form}{depth // 8}"
        if len(depths) > 1 or len(forms) > 1 or depth % 8 or dtype not in _TYPES or (is_white_0 and form != _UNSIGNED):
            raise ValueError(f"{name} in samples that are not read, expected whole or floating numbers of 8 to 64 bits")
        if bands > 4 or bands < (3 if colour == _RGB else 1) or (bands != 1 and is_white_0):
            raise ValueError(f"{name}, expected grey, or 3 or 4 whose first are red, green and blue")
        if not is_planar and (bands == 2 or (bands == 4 and depth > 16)):
            raise ValueError(f"{name}, pixel by pixel, expected them in planes. Save it so, or without alpha")
        levels = _retagged(tags, bands, is_planar, depth)
    except struct.error:
        return None
    if levels is None:
        raise ValueError(f"{name} that does not decode: it is damaged, or of an unknown compression")
    levels = levels.view(dtype)
    return np.iinfo(levels.dtype).max - levels if is_white_0 else levels


def _retagged(tags: TiffDirectory, bands: int, is_planar: bool, depth: int) -> NDArray[Any] | None:
    """The samples (H, W, 3) as OpenCV reads them without a change: unsigned up to 16 bits, floating beyond."""
    form = 1 if depth <= 16 else 3
    if bands >= 3 and not is_planar:
        changed = {_DEPTH: (depth,) * bands, _COLOUR: (_RGB,), _BANDS: (bands,), _FORM: (form,) * bands}
        changed |= {_EXTRA: (0,)} if bands == 4 else {}
        levels = cv2.imdecode(tags.with_tags(changed), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
        return None if levels is None else np.ascontiguousarray(levels[..., ::-1])
    planes: list[NDArray[Any]] = []
    for plane in range(3 if bands >= 3 else 1):
        changed = {_DEPTH: (depth,), _COLOUR: (_BLACK_IS_0,), _BANDS: (1,), _FORM: (form,)}
        for tag in _PIECES if is_planar else ():
            pieces = tags.numbers(tag)
            each = len(pieces) // bands
            changed |= {tag: pieces[plane * each : (plane + 1) * each]} if pieces else {}
        levels = cv2.imdecode(tags.with_tags(changed), cv2.IMREAD_ANYDEPTH)
        if levels is None:
            return None
        planes.append(levels)
    return np.dstack(planes * (3 // len(planes)))
