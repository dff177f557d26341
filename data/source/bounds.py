"""How large a picture may be: what its first bytes state, against what the file can hold and a budget of pixels.

A header of a few bytes can ask for gigabytes, and a decoder fills them before it finds that nothing follows.
"""

from __future__ import annotations

import mmap
import re
import struct
from typing import NamedTuple

from tessera.utils.environment import max_pixels

LARGE = 1 << 25  # pixels; decoded, they take 100 MB
_HARMLESS = 1 << 24  # pixels; a file that breaks off is used as far as it goes
_BYTES_A_PIXEL = 16  # more than any format needs; a file may have so many for each pixel of the budget
_DEFLATE = 1032  # times as large as the compressed bytes, at most (zlib.net/zlib_tech.html)
_JPEG_BLOCK, _JPEG_BLOCKS_A_BYTE = 64, 8  # a code of at least one bit for each block of 8 x 8 (ITU T.81, F.1.2)
_RLE = 128  # pixels a byte, at most
MARKER = re.compile(rb"\xff+([\x01-\xfe])")  # as libjpeg finds the next one, whatever lies before it
_MARKERS = 5000  # a header has dozens
_PNM = re.compile(rb"P[1-7fF]\s+(\d{1,9})\s+(\d{1,9})\s")

Buffer = bytes | memoryview | mmap.mmap


class Stated(NamedTuple):
    """What the first bytes say: how many pixels, and how long a file with so many is at least, in bytes."""

    pixels: int
    least_bytes: int


def refuse_large(encoded: Buffer) -> int | None:
    """Pixels that a picture states; None where its format is not known here.

    Raises:
        ValueError: it is larger than TESSERA_MAX_PIXELS allows, or than its file can hold.
    """
    most = max_pixels()
    if len(encoded) > _BYTES_A_PIXEL * most:
        raise ValueError(f"{len(encoded):,} bytes, more than {most:,} pixels (TESSERA_MAX_PIXELS) need")
    found = stated(encoded)
    if found is None:
        return None
    if found.pixels > most:
        raise ValueError(
            f"{found.pixels:,} pixels, expected at most {most:,}; set TESSERA_MAX_PIXELS to use larger pictures"
        )
    if found.pixels > _HARMLESS and found.least_bytes > len(encoded):
        raise ValueError(f"it states {found.pixels:,} pixels, which its {len(encoded):,} bytes cannot hold")
    return found.pixels


def stated(encoded: Buffer) -> Stated | None:
    """What a picture states; None where its format is not known here, or its header breaks off."""
    head = bytes(encoded[:64])
    try:
        if head[:2] == b"\xff\xd8":
            return _jpeg(encoded)
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            return _png(head)
        if head[:2] == b"BM":
            return _bmp(head)
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp(head)
        if head[:4] in (b"II*\0", b"MM\0*"):
            return _tiff(encoded)
        if head[:3] == b"GIF":
            width, height = struct.unpack_from("<HH", head, 6)
            return Stated(width * height, 0)
    except (struct.error, IndexError):
        return None
    if match := _PNM.match(head):
        return Stated(int(match[1]) * int(match[2]), 0)
    return None


def _jpeg(encoded: Buffer) -> Stated | None:
    """The first frame header of any coding (ITU T.81, B.2.2)."""
    at = 2
    for _ in range(_MARKERS):
        match = MARKER.search(encoded, at)
        if match is None:
            return None
        marker, at = match[1][0], match.end()
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # these stand alone
            continue
        length, _, height, width = struct.unpack_from(">HBHH", encoded, at)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return Stated(height * width, height * width // (_JPEG_BLOCK * _JPEG_BLOCKS_A_BYTE))
        at += length
    return None


def _png(head: bytes) -> Stated:
    """IHDR (PNG 3rd edition, 11.2.1)."""
    width, height, depth, colour = struct.unpack_from(">IIBB", head, 16)
    row = (width * depth * {2: 3, 4: 2, 6: 4}.get(colour, 1) + 7) // 8 + 1
    return Stated(width * height, height * row // _DEFLATE)


def _bmp(head: bytes) -> Stated:
    """The header of OS/2, or BITMAPINFOHEADER and its successors."""
    if struct.unpack_from("<I", head, 14)[0] < 40:
        width, height, _, depth = struct.unpack_from("<HHHH", head, 18)
        return Stated(width * height, width * height * depth // 8)
    width, height, _, depth, compression = struct.unpack_from("<iiHHI", head, 18)
    pixels = abs(width) * abs(height)
    return Stated(pixels, pixels // _RLE if compression in (1, 2) else pixels * depth // 8)


def _webp(head: bytes) -> Stated | None:
    """The first chunk (WebP container specification); a picture of one colour may take a few bytes."""
    chunk = head[12:16]
    if chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
    elif chunk == b"VP8L":
        bits = struct.unpack_from("<I", head, 21)[0]
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    else:
        return None
    return Stated(width * height, 0)


def _tiff(encoded: Buffer) -> Stated | None:
    """ImageWidth and ImageLength of the first directory (TIFF 6.0, section 2)."""
    order = "<" if encoded[0] == ord("I") else ">"
    (start,) = struct.unpack_from(order + "I", encoded, 4)
    (entries,) = struct.unpack_from(order + "H", encoded, start)
    sides: dict[int, int] = {}
    for entry in range(entries):
        tag, kind = struct.unpack_from(order + "HH", encoded, start + 2 + 12 * entry)
        if tag in (256, 257):
            (sides[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), encoded, start + 10 + 12 * entry)
    return Stated(sides[256] * sides[257], 0) if len(sides) == 2 else None
