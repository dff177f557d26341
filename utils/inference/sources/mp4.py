"""What the header of an MP4 or QuickTime file states of its video: how many frames, and how long it is shown.

The header counts all frames of the file, also those that an edit list cuts off: a clip that was trimmed without coding
it anew has more of them than are shown. Only with the edit list can such a file be told from one that breaks off.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from tessera.utils.files import open_plain

_LONGEST_HEADER = 1 << 26  # bytes
_SLACK, _SLACK_S = 0.05, 0.5  # by so much may durations of a sound file differ
_MOST_BOXES, _MOST_EDITS = 10_000, 10_000

Box = tuple[bytes, memoryview]


class Movie(NamedTuple):
    """The first video track.

    Attributes:
        frames: that the file has.
        shown_s: seconds that the edit list shows of them; None where there is no list, or one that contradicts the
            times of the frames.
    """

    frames: int
    shown_s: float | None


def read_movie(path: str) -> Movie | None:
    """What the header states; None where it is none, or damaged."""
    try:
        with open_plain(path) as file:
            header = _movie_header(file)
        return None if header is None else _first_video(header)
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


def _first_video(moov: memoryview) -> Movie | None:
    for kind, track in _boxes(moov):
        handler = _inner(track, b"mdia", b"hdlr") if kind == b"trak" else None
        if handler is not None and bytes(handler[8:12]) == b"vide":
            times = _inner(track, b"mdia", b"minf", b"stbl", b"stts")
            if times is None:
                return None
            frames, ticks = _times(times)
            return Movie(frames, _shown(moov, track, frames, ticks)) if frames else None
    return None


def _shown(moov: memoryview, track: memoryview, frames: int, ticks: int) -> float | None:
    """Seconds of the edit list; None where the header's other durations do not go with it."""
    edits = _inner(track, b"edts", b"elst")
    movie, media = (_duration(_inner(*box)) for box in ((moov, b"mvhd"), (track, b"mdia", b"mdhd")))
    if edits is None or not movie.timescale or not media.timescale:
        return None
    shown_s, media_s, frame_s = _sum(edits) / movie.timescale, media.ticks / media.timescale, ticks / frames
    sound = abs(ticks - media.ticks) <= frame_s + _SLACK * media.ticks and shown_s <= media_s * (1 + _SLACK) + _SLACK_S
    return shown_s if sound and shown_s > 0 else None


class _Duration(NamedTuple):
    ticks: int
    timescale: int


def _duration(header: memoryview | None) -> _Duration:
    """Of a movie or its media (8.2.2, 8.4.2); zeros where there is no header."""
    if header is None:
        return _Duration(0, 0)
    (version,) = struct.unpack_from(">B", header)
    timescale, ticks = struct.unpack_from(">IQ" if version == 1 else ">II", header, 20 if version == 1 else 12)
    return _Duration(ticks, timescale)


def _times(table: memoryview) -> tuple[int, int]:
    """How many frames there are, and how many ticks they last (8.6.1.2)."""
    count = min(struct.unpack_from(">I", table, 4)[0], (len(table) - 8) // 8)
    rows = np.frombuffer(table, ">u4", 2 * count, 8).reshape(-1, 2).astype(np.int64)
    return int(rows[:, 0].sum()), int((rows[:, 0].astype(float) * rows[:, 1]).sum())


def _sum(edits: memoryview) -> float:
    """Durations of the edits that show something (8.6.6)."""
    (version,) = struct.unpack_from(">B", edits)
    entry = ">QqI" if version == 1 else ">IiI"
    count = min(struct.unpack_from(">I", edits, 4)[0], _MOST_EDITS)
    rows = (struct.unpack_from(entry, edits, 8 + i * struct.calcsize(entry)) for i in range(count))
    return float(sum(duration for duration, start, _ in rows if start >= 0))
