"""What a file is by its first bytes, for those without a known suffix and for pipes."""

from __future__ import annotations

import re

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


def holds_picture(head: bytes) -> bool:
    """Whether a file that begins so is a picture that OpenCV may decode."""
    return _PICTURE.match(head) is not None


def holds_video(head: bytes) -> bool:
    """Whether a file that begins so is a video: MP4, AVI, Matroska, MPEG, Flash, Ogg, GIF, ASF."""
    return _VIDEO.match(head) is not None
