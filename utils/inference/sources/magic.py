"""What a file is by its first bytes, for those without a known suffix and for pipes; and whether its end is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from utils.files import open_plain

_PICTURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|BM.{4}\0\0\0\0|RIFF.{4}WEBP|II\*\0|MM\0\*|P[1-7fF]\s|\0\0\0\x0cjP  \r\n",
    re.DOTALL,
)
_VIDEO = re.compile(
    rb".{4}ftyp|.{4}moov|.{4}mdat|RIFF.{4}AVI |\x1aE\xdf\xa3|\0\0\x01[\xb3\xba]|FLV\x01|OggS|GIF8[79]a|"
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    re.DOTALL,
)
HEAD = 64  # bytes that decide
_TAIL = 4096  # bytes; where most files have their end mark
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_MARKER = re.compile(rb"\xff+([\x01-\xfe])")
_JPEG_SCAN, _JPEG_BARE = 0xDA, frozenset({0x01, *range(0xD0, 0xDA)})  # the latter have no length


def holds_picture(head: bytes) -> bool:
    """Whether a file that begins so is a picture that OpenCV may decode."""
    return _PICTURE.match(head) is not None


def holds_video(head: bytes) -> bool:
    """Whether a file that begins so is a video: MP4, AVI, Matroska, MPEG, Flash, Ogg, GIF, ASF."""
    return _VIDEO.match(head) is not None


def breaks_off(encoded: Path | bytes) -> bool:
    """Whether a JPEG or PNG file lacks the mark of its end, a trailer after it or not; False for all others.

    Args:
        encoded: the file, or its content; one that decoded.
    """
    if isinstance(encoded, bytes):
        return _lacks_end(encoded, encoded[-_TAIL:]) and _lacks_end(encoded, _coded(encoded))
    try:
        with open_plain(encoded) as file:
            head, length = file.read(HEAD), os.fstat(file.fileno()).st_size
            file.seek(max(length - _TAIL, 0))
            if not _lacks_end(head, file.read()):
                return False
            file.seek(0)
            return _lacks_end(head, _coded(file.read()))
    except OSError:  # gone since it was decoded
        return False


def _lacks_end(head: bytes, part: bytes) -> bool:
    if head[:2] == _JPEG_START:
        return _JPEG_END not in part
    return head[:4] == b"\x89PNG" and b"IEND" not in part


def _coded(content: bytes) -> bytes:
    """A JPEG from its first scan on: the headers before may hold a preview with an end of its own (ITU T.81, B.1)."""
    at = 2
    while content[:2] == _JPEG_START and (match := _MARKER.search(content, at)) is not None:
        marker, at = match[1][0], match.end()
        if marker == _JPEG_SCAN:
            return content[at:]
        if marker not in _JPEG_BARE:
            at += max(int.from_bytes(content[at : at + 2], "big"), 2)
    return content
