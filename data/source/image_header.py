"""What a file of a picture or video says of itself before it is decoded: kind, size, orientation, whether it is whole.

A header of a few bytes can ask for gigabytes, and a decoder fills them before it finds that nothing follows. Pillow
reads size and orientation too, in 2.6 times the time (27 against 10 µs an image of coco128), but of an EXIF block that
breaks off another orientation than OpenCV, and it says nothing of a file's end.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from tessera.data.source.tiff import HEIGHT, TIFF_STARTS, WIDTH, TiffDirectory
from tessera.utils.environment import max_pixels
from tessera.utils.files import open_plain

LARGE = 1 << 25  # pixels; decoded, they take 100 MB
KIND_BYTES = 64  # that show what a file is
_HARMLESS = 1 << 24  # pixels; a file that breaks off is used as far as it goes
_BYTES_A_PIXEL = 16  # more than any format needs; a file may have so many for each pixel of the budget
_DEFLATE = 1032  # times as large as the compressed bytes, at most (zlib.net/zlib_tech.html)
_JPEG_BLOCK, _JPEG_BLOCKS_A_BYTE = 64, 8  # a code of at least one bit for each block of 8 x 8 (ITU T.81, F.1.2)
_RLE = 128  # pixels a byte, at most
_HEAD = 4096  # bytes; enough for most files
_MORE = (1 << 16, 1 << 20)  # for the metadata of cameras: preview, colour profile
_TAIL = 4096  # bytes; where most files have their end mark

JPEG_START, JPEG_END, PNG_START = b"\xff\xd8", b"\xff\xd9", b"\x89PNG\r\n\x1a\n"
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")  # as libjpeg finds the next one, whatever lies before it
_MOST_MARKERS = 5000  # a header has dozens
_BARE = frozenset({0x01, *range(0xD0, 0xDA)})  # markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of the frame header, one for each coding
_COMMON_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # those that libjpeg decodes everywhere
_END, _SCAN, _APPLICATION = 0xD9, 0xDA, 0xE1
_FRAME = struct.Struct(">BHH")  # bits a channel, height, width
_PNM = re.compile(rb"P[1-7fF]\s+(\d{1,9})\s+(\d{1,9})\s")
_PICTURE = re.compile(
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


def holds_picture(head: bytes) -> bool:
    """Whether a file that begins so is a picture that OpenCV may decode."""
    return _PICTURE.match(head) is not None


def holds_video(head: bytes) -> bool:
    """Whether a file that begins so is a video: MP4, AVI, Matroska, MPEG, Flash, Ogg, GIF, ASF."""
    return _VIDEO.match(head) is not None


def has_8_bits(head: bytes) -> bool:
    """Whether a format has 8 bits a channel: JPEG, BMP, WebP, most PNG; of AVIF and HEIF OpenCV makes 8."""
    if head[:8] == PNG_START:
        return head[24:25] != b"\x10"
    return head[:2] in (JPEG_START, b"BM") or head[8:12] == b"WEBP" or head[4:8] == b"ftyp"


class Header(NamedTuple):
    """What the first bytes of a picture state.

    Attributes:
        size_hw: height and width in pixels.
        least_bytes: how long a file with so many pixels is at least.
        is_decoded_size: the decoded picture has this height and width: they are turned as EXIF says, and nothing is
            unusual about the file. Else only decoding can tell.
        orientation: of a JPEG, as EXIF numbers it: 1 is upright, 2 to 8 are turned or mirrored when it is decoded.
    """

    size_hw: Size
    least_bytes: int = 0
    is_decoded_size: bool = False
    orientation: int = 1

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.size_hw[0] * self.size_hw[1]


def read_header(encoded: Buffer, length: int | None = None) -> Header | None:
    """What a picture states; None where its format is not known here, or its header breaks off.

    `encoded` is the file from its start on, `length` that of the whole file in bytes.
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
    """As `read_header`, of a file of `length` bytes; less than 0 where it is no plain file.

    Raises:
        OSError: it cannot be read; `strerror` says why.
    """
    if length < 0:
        open_plain(path).close()  # says what it is
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # waits for nothing, whatever came since
    try:
        head = os.read(descriptor, _HEAD)
        header = read_header(head, length)
        if head[:2] == JPEG_START:
            for more in _MORE:
                if header is None:  # the metadata is longer than what was read
                    head += os.read(descriptor, more)
                    header = read_header(head, length)
        elif head[:8] != PNG_START:
            return header
        elif b"IDAT" not in head:
            head += os.read(descriptor, _MORE[-1])
        tail = os.pread(descriptor, _TAIL, max(length - _TAIL, 0))
    finally:
        os.close(descriptor)
    # The chunk eXIf of a PNG, before or after its pixels, may rotate it, or not.
    may_turn = head[:8] == PNG_START and (b"IDAT" not in head or b"eXIf" in head or b"eXIf" in tail)
    return header._replace(is_decoded_size=False) if header and (may_turn or _lacks_end(head, tail)) else header


def refuse_large(header: Header | None, length: int) -> None:
    """Raise a ValueError for a picture larger than TESSERA_MAX_PIXELS allows, or than its file of `length` can hold."""
    most = max_pixels()
    if length > _BYTES_A_PIXEL * most:
        raise ValueError(f"{length:,} bytes, more than {most:,} pixels (TESSERA_MAX_PIXELS) need")
    if header is None:
        return
    if header.pixels > most:
        raise ValueError(
            f"{header.pixels:,} pixels, expected at most {most:,}; set TESSERA_MAX_PIXELS to use larger pictures"
        )
    if header.pixels > _HARMLESS and header.least_bytes > length:
        raise ValueError(f"it states {header.pixels:,} pixels, which its {length:,} bytes cannot hold")


def breaks_off(encoded: Path | bytes) -> bool:
    """Whether a JPEG or PNG that decoded lacks the mark of its end, a trailer after it or not; False for others."""
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
    """A JPEG from its first scan on: the headers before may hold a preview with an end of its own (ITU T.81, B.1)."""
    at = 2
    while content[:2] == JPEG_START and (match := _MARKER.search(content, at)) is not None:
        marker, at = match[1][0], match.end()
        if marker == _SCAN:
            return content[at:]
        if marker not in _BARE:
            at += max(int.from_bytes(content[at : at + 2], "big"), 2)
    return content


def _jpeg(encoded: Buffer) -> Header | None:
    """Walk the markers (ITU T.81, B.1) up to the first frame header of any coding (B.2.2), as libjpeg does."""
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
            least_bytes = height * width // (_JPEG_BLOCK * _JPEG_BLOCKS_A_BYTE)
            return Header((width, height) if orientation >= 5 else (height, width), least_bytes, is_usual, orientation)
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
                is_usual = is_usual and applications == 1  # readers differ in which of several segments they use
                orientation = _exif_orientation(bytes(encoded[at + 8 : at + length]))
        at += length
    return None


def _exif_orientation(tiff: bytes) -> int:
    """Tag 0x0112 of the first directory (Exif 2.3, 4.6.4), 1 where it is missing; 5 to 8 swap width and height."""
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
    """IHDR is the first chunk (PNG 3rd edition, 11.2.1)."""
    width, height, depth, colour = struct.unpack_from(">IIBB", head, 16)
    row = (width * depth * {2: 3, 4: 2, 6: 4}.get(colour, 1) + 7) // 8 + 1
    return Header((height, width), height * row // _DEFLATE, head[12:16] == b"IHDR")


def _bmp(head: bytes, length: int) -> Header:
    """The header of OS/2, or BITMAPINFOHEADER and its successors; a negative height means top to bottom."""
    if struct.unpack_from("<I", head, 14)[0] < 40:
        width, height, _, depth = struct.unpack_from("<HHHH", head, 18)
        return Header((height, width), width * height * depth // 8)
    width, height, _, depth, compression = struct.unpack_from("<iiHHI", head, 18)
    pixels = abs(width * height)
    is_usual = width > 0 and struct.unpack_from("<I", head, 2)[0] <= length
    least_bytes = pixels // _RLE if compression in (1, 2) else pixels * depth // 8
    return Header((abs(height), abs(width)), least_bytes, is_usual)


def _webp(head: bytes, length: int) -> Header | None:
    """The first chunk of the container: lossy, lossless or extended (WebP container specification; RFC 6386, 9.1)."""
    chunk = head[12:16]  # a picture of one colour may take a few bytes, so there is no least length
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
    return Header((height, width), 0, is_usual and is_whole)


def _tiff(encoded: Buffer) -> Header | None:
    """ImageWidth and ImageLength of the first directory."""
    first = TiffDirectory.read(encoded)
    width, height = first.numbers(WIDTH), first.numbers(HEIGHT)
    return Header((height[0], width[0])) if width and height else None
