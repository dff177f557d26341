"""How long the video of an MP4 or QuickTime file is shown.

Its header counts all frames of the file, also those that an edit list cuts off: a clip that was trimmed without coding
it anew has more of them than are shown. Only with the edit list can such a file be told from one that breaks off.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

from utils.files import open_plain

_LONGEST_HEADER = 1 << 26  # bytes
_MOST_BOXES, _MOST_EDITS = 10_000, 10_000

Box = tuple[bytes, memoryview]


def edited_seconds(path: str) -> float | None:
    """Seconds that the edit list of the first video track shows; None where there is none, or no such file."""
    try:
        with open_plain(path) as file:
            header = _movie_header(file)
        return None if header is None else _shown(header)
    except (OSError, struct.error):
        return None


def _movie_header(file: IO[bytes]) -> memoryview | None:
    """The content of the box moov (ISO/IEC 14496-12, 8.2.1)."""
    for _ in range(_MOST_BOXES):
        head = file.read(8)
        if len(head) < 8:
            return None
        size, kind = struct.unpack(">I4s", head)
        length = size - 8
        if size == 1:
            length = struct.unpack(">Q", file.read(8))[0] - 16
        if kind == b"moov" and 0 <= length <= _LONGEST_HEADER:
            return memoryview(file.read(length))
        if length < 0 or length > 1 << 62:
            return None
        file.seek(length, 1)
    return None


def _boxes(content: memoryview) -> Iterator[Box]:
    """Type and content of the boxes in a box (ISO/IEC 14496-12, 4.2)."""
    at = 0
    while at + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        if size < 8 or at + size > len(content):
            return
        yield kind, content[at + 8 : at + size]
        at += size


def _inner(content: memoryview, *names: bytes) -> memoryview | None:
    """The first box below `content` along the path of `names`."""
    for name in names:
        found = next((inner for kind, inner in _boxes(content) if kind == name), None)
        if found is None:
            return None
        content = found
    return content


def _shown(moov: memoryview) -> float | None:
    header = _inner(moov, b"mvhd")
    if header is None:
        return None
    (timescale,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    for kind, track in _boxes(moov):
        handler = _inner(track, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler is not None and bytes(handler[8:12]) == b"vide":
            edits = _inner(track, b"edts", b"elst")
            return None if edits is None or not timescale else _sum(edits) / timescale or None
    return None


def _sum(edits: memoryview) -> float:
    """Durations of the edits that show something (8.6.6)."""
    entry = ">QqI" if edits[0] == 1 else ">IiI"
    count = min(struct.unpack_from(">I", edits, 4)[0], _MOST_EDITS)
    rows = (struct.unpack_from(entry, edits, 8 + i * struct.calcsize(entry)) for i in range(count))
    return float(sum(duration for duration, start, _ in rows if start >= 0))
