"""Image file headers without decoding: format, size, orientation, truncation, pixel limit; layouts and pages of TIFF.

A header of a few bytes can claim gigabytes, which a decoder allocates first. Pillow takes 2.6 times as long (27 against
10 µs an image of coco128), reads other orientations than OpenCV from truncated EXIF, does not check a file's end,
refuses deep and planar TIFF, and loads every tag of one, which may be gigabytes in a crafted file.
"""

from __future__ import annotations

import os
import re
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.bit_depth import Pixels
from tessera.utils.environment import max_pixels
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import plural

LARGE = 1 << 25  # pixels; 100 MB decoded
KIND_BYTES = 64  # that identify the format
_BYTES_A_PIXEL = 16  # more than any format needs
_HEAD = 4096  # bytes; enough for most files
_MORE = (1 << 16, 1 << 20)  # bytes for camera metadata: preview, colour profile
_TAIL = 4096  # bytes that hold the end mark of most files

JPEG_START, JPEG_END, PNG_START = b"\xff\xd8", b"\xff\xd9", b"\x89PNG\r\n\x1a\n"
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")  # as libjpeg searches for the next marker
_MOST_MARKERS = 5000  # a header has dozens
_BARE = frozenset({0x01, *range(0xD0, 0xDA)})  # markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # frame header markers, one for each coding
_COMMON_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # codings that every libjpeg decodes
_END, _SCAN, _APPLICATION = 0xD9, 0xDA, 0xE1
_FRAME = struct.Struct(">BHH")  # bits a channel, height, width
_PNM = re.compile(rb"P[1-7fF]\s+(\d{1,9})\s+(\d{1,9})\s")
_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|BM.{4}\0\0\0\0|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|P[1-7fF]\s|"
    rb"\0\0\0\x0cjP  \r\n|.{4}ftyp(?:avif|avis|heic|heix|mif1)",
    re.DOTALL,
)
_VIDEO = re.compile(
    rb".{4}ftyp|.{4}moov|.{4}mdat|RIFF.{4}AVI |\x1aE\xdf\xa3|\0\0\x01[\xb3\xba]|FLV\x01|OggS|GIF8[79]a|"
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    re.DOTALL,
)

Buffer = bytes | memoryview
Size = tuple[int, int]
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


def is_image(head: bytes) -> bool:
    """Return whether the first bytes are of an image format that OpenCV may decode."""
    return _IMAGE.match(head) is not None


def is_video(head: bytes) -> bool:
    """Return whether the first bytes are of a video: MP4, AVI, Matroska, MPEG, Flash, Ogg, GIF, ASF."""
    return _VIDEO.match(head) is not None


def has_8_bits(head: bytes) -> bool:
    """Return whether the format has 8 bits a channel; OpenCV converts AVIF and HEIF to 8 bits."""
    if head[:8] == PNG_START:
        return head[24:25] != b"\x10"
    return head[:2] in (JPEG_START, b"BM") or head[8:12] == b"WEBP" or head[4:8] == b"ftyp"


class Header(NamedTuple):
    """Facts from the first bytes of an image."""

    size_hw: Size  # height and width in pixels
    is_decoded_size: bool = False  # whether the decoded image is sure to have this size, EXIF orientation included
    orientation: int = 1  # EXIF orientation of a JPEG: 1 is upright, 2 to 8 are rotated or mirrored by decoding

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.size_hw[0] * self.size_hw[1]


def read_header(encoded: Buffer, length: int | None = None) -> Header | None:
    """Parse an image header; None if the format is unknown or the header is truncated.

    `encoded` is the start of the file, `length` the size of the whole file in bytes.
    """
    head, length = bytes(encoded[:KIND_BYTES]), len(encoded) if length is None else length
    try:
        if head[:2] == JPEG_START:
            return _jpeg(encoded)
        if head[:8] == PNG_START:
            return _png(head)
        if head[:2] == b"BM":
            return _bmp(head, length)
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp(head, length)
        if head[:4] in TIFF_STARTS:
            return _tiff(encoded)
        if head[:3] == b"GIF":
            width, height = struct.unpack_from("<HH", head, 6)
            return Header((height, width))
    except (struct.error, IndexError):
        return None
    if match := _PNM.match(head):
        return Header((int(match[2]), int(match[1])))
    return None


def read_file_header(path: str, length: int) -> Header | None:
    """Parse the header of a file of `length` bytes; a negative length means that it is not a plain file.

    Raises:
        OSError: it cannot be read; `strerror` says why.
    """
    if length < 0:
        open_plain(path).close()  # raises with the kind of file
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    try:
        head = os.read(descriptor, _HEAD)
        header = read_header(head, length)
        if head[:2] == JPEG_START:
            for more in _MORE:
                if header is None:  # the metadata is longer
                    head += os.read(descriptor, more)
                    header = read_header(head, length)
        elif head[:8] != PNG_START:
            return header
        elif b"IDAT" not in head:
            head += os.read(descriptor, _MORE[-1])
        tail = os.pread(descriptor, _TAIL, max(length - _TAIL, 0))
    finally:
        os.close(descriptor)
    # Readers differ in whether the eXIf chunk of a PNG, before or after its pixels, rotates it.
    may_turn = head[:8] == PNG_START and (b"IDAT" not in head or b"eXIf" in head or b"eXIf" in tail)
    return header._replace(is_decoded_size=False) if header and (may_turn or _lacks_end(head, tail)) else header


def most_bytes() -> int:
    """Return the largest size of an image file."""
    return _BYTES_A_PIXEL * max_pixels()


def require_decodable_size(header: Header | None, length: int) -> None:
    """Raise a ValueError if an image, or its file of `length` bytes, exceeds TESSERA_MAX_PIXELS."""
    most = max_pixels()
    if length > most_bytes():
        raise ValueError(f"{length:,} bytes, more than the maximum of {most:,} pixels (TESSERA_MAX_PIXELS) needs")
    if header is not None and header.pixels > most:
        raise ValueError(
            f"{header.pixels:,} pixels, expected at most {most:,}; set TESSERA_MAX_PIXELS to use larger images"
        )


def is_truncated(encoded: Path | bytes) -> bool:
    """Return whether a decoded JPEG or PNG lacks its end mark; False for other formats."""
    if isinstance(encoded, Path):
        try:
            with open_plain(encoded) as file:
                encoded = file.read()
        except OSError:  # gone since it was decoded
            return False
    return _lacks_end(encoded, encoded[-_TAIL:]) and _lacks_end(encoded, _without_preview(encoded))


def _lacks_end(head: bytes, part: bytes) -> bool:
    if head[:2] == JPEG_START:
        return not part.endswith(JPEG_END) and JPEG_END not in part
    return head[:8] == PNG_START and b"IEND" not in part


def _without_preview(content: bytes) -> bytes:
    """Return a JPEG from its first scan on, as its headers may hold a preview with an end mark (ITU T.81, B.1)."""
    at = 2
    while content[:2] == JPEG_START and (match := _MARKER.search(content, at)) is not None:
        marker, at = match[1][0], match.end()
        if marker == _SCAN:
            return content[at:]
        if marker not in _BARE:
            at += max(int.from_bytes(content[at : at + 2], "big"), 2)
    return content


def _jpeg(encoded: Buffer) -> Header | None:
    """Walk the markers (ITU T.81, B.1) to the first frame header (B.2.2), as libjpeg does."""
    at, is_usual, orientation, applications = 2, True, 1, 0
    for _ in range(_MOST_MARKERS):
        match = _MARKER.search(encoded, at)
        if match is None:
            return None
        if match.start() != at:
            is_usual = False
        at = match.end()
        marker = encoded[at - 1]
        if marker in _FRAMES:
            depth, height, width = _FRAME.unpack_from(encoded, at + 2)
            is_usual = is_usual and marker in _COMMON_FRAMES and depth == 8 and height > 0 and width > 0
            return Header((width, height) if orientation >= 5 else (height, width), is_usual, orientation)
        if marker in (_SCAN, _END):
            is_usual = False
        if marker in _BARE:
            continue
        length = encoded[at] << 8 | encoded[at + 1]
        if marker == _APPLICATION:
            applications += 1
            if bytes(encoded[at + 2 : at + 8]) == b"Exif\0\0":
                if at + length > len(encoded):
                    return None
                is_usual = is_usual and applications == 1  # of several segments, readers use different ones
                orientation = _exif_orientation(bytes(encoded[at + 8 : at + length]))
        at += length
    return None


def _exif_orientation(tiff: bytes) -> int:
    """Return tag 0x0112 of the first directory (Exif 2.3, 4.6.4), 1 if missing; 5 to 8 swap width and height."""
    try:
        if tiff[:4] not in (b"II*\0", b"MM\0*"):
            return 1
        order = "<" if tiff[:1] == b"I" else ">"
        start = struct.unpack_from(order + "I", tiff, 4)[0]
        for entry in range(struct.unpack_from(order + "H", tiff, start)[0]):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == 0x0112:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _png(head: bytes) -> Header:
    """Parse IHDR, the first chunk (PNG 3rd edition, 11.2.1)."""
    width, height = struct.unpack_from(">II", head, 16)
    return Header((height, width), head[12:16] == b"IHDR")


def _bmp(head: bytes, length: int) -> Header:
    """Parse the header of OS/2, or BITMAPINFOHEADER and later; a negative height means top to bottom."""
    if struct.unpack_from("<I", head, 14)[0] < 40:
        width, height = struct.unpack_from("<HH", head, 18)
        return Header((height, width))
    width, height = struct.unpack_from("<ii", head, 18)
    return Header((abs(height), abs(width)), width > 0 and struct.unpack_from("<I", head, 2)[0] <= length)


def _webp(head: bytes, length: int) -> Header | None:
    """Parse the first chunk: lossy, lossless or extended (WebP container specification; RFC 6386, 9.1)."""
    chunk = head[12:16]
    if chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
        is_usual = head[23:26] == b"\x9d\x01\x2a"
    elif chunk == b"VP8L":
        bits = struct.unpack_from("<I", head, 21)[0]
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        is_usual = head[20] == 0x2F
    elif chunk == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        is_usual = not head[20] & 0b1010  # neither EXIF nor animation
    else:
        return None
    is_whole = len(head) >= 30 and struct.unpack_from("<I", head, 4)[0] + 8 <= length
    return Header((height, width), is_usual and is_whole)


def _tiff(encoded: Buffer) -> Header | None:
    first = TiffDirectory.read(encoded)
    width, height = first.numbers(WIDTH), first.numbers(HEIGHT)
    return Header((height[0], width[0])) if width and height else None


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
