"""A video file: its frames numbered from 0 and timed by their presentation time stamps."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tessera.utils.files import open_plain
from tessera.utils.inference.sources.capture import Capture, rgb_of
from tessera.utils.inference.sources.frames import Frame, Kind, SourceEvent, VideoFacts
from tessera.utils.inference.sources.origins import Origin
from tessera.utils.text import counted, first_line, one_line

# By so much a video may be shorter than it states: containers without a count state the sound's length, or a guess.
_SLACK_S, _SLACK = 0.5, 0.05
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})  # of MP4 and QuickTime files


def read_video(origin: Origin, vid_stride: int = 1, path: str = "") -> Iterator[Frame | SourceEvent]:
    """Frames of a video in order, and the events "opened" and "ended" around them.

    Args:
        origin: the video.
        vid_stride: each so many-th frame is given, beginning with the first; the others are decoded, but not converted.
        path: where the file is, if not where the origin says.

    Yields:
        an event "unreadable" alone where nothing decodes; "damaged" instead of "ended" where the video breaks off.
    """
    path = os.path.abspath(path or origin.where)  # noqa: PTH100 - FFmpeg takes a relative a:b for a protocol
    place, number, time_s = origin.place, 0, 0.0

    def event(kind: Kind, message: str, facts: VideoFacts | None = None) -> SourceEvent:
        said = f"{one_line(origin.source, 4096)}: {message}"
        return SourceEvent(origin.source, kind, said, "video", place, number, time_s, facts=facts)

    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        yield event("unreadable", f"cannot read the video ({why}). Restore it or take it out.")
        return
    with Capture(path) as capture:
        if not capture.is_open:
            yield event("unreadable", f"found {size:,} bytes that do not decode, expected a video.")
            return
        facts, lost = capture.facts, 0
        yield event("opened", "opened", facts)
        while capture.grab():
            passed_s = capture.time_s
            has_time = number == 0 or passed_s > 0  # raw streams have no time stamps
            time_s = max(passed_s, time_s)
            if number % vid_stride == 0:
                pixels = capture.retrieve()
                if pixels is None:
                    lost += 1
                else:
                    frame = Frame(rgb_of(pixels), origin.source, "video", place, number, passed_s if has_time else None)
                    del pixels
                    yield frame
                    del frame  # nothing is kept while the next one is decoded
            number += 1
    if lost == len(range(0, number, vid_stride)):
        yield event("unreadable", "not one frame of the video decodes.")
    elif stated := _breaks_off(path, facts, number, time_s):
        yield event("damaged", f"damaged: it ends after {counted(number - lost, 'frame')}, {stated} it states.")
    elif lost:
        yield event("damaged", f"damaged: {lost:,} of its {number:,} frames do not decode.")
    else:
        yield event("ended", f"ended after {counted(number, 'frame')}")


def _breaks_off(path: str, facts: VideoFacts, frames: int, time_s: float) -> str:
    """How much more a video states, where it ended before; "" where it did not, or states nothing.

    Args:
        path: of the file.
        facts: as OpenCV has them; of files without a count the number of frames is a guess.
        frames, time_s: how many came, and the time of the last one.
    """
    if facts.frames is None or frames >= facts.frames - 1:
        return ""
    is_cut = _boxes_are_cut(path)
    if is_cut is not None:  # a clip that was trimmed without coding it anew has more frames than it shows
        return f"of the {facts.frames:,}" if is_cut else ""
    if facts.fps is None:  # its times are nonsense
        return ""
    stated_s = facts.frames / facts.fps
    is_short = stated_s - time_s - 1 / facts.fps > max(_SLACK_S, _SLACK * stated_s)
    return f"at {time_s:.2f} s of the {stated_s:.2f} s" if is_short else ""


def _boxes_are_cut(path: str) -> bool | None:
    """Whether the outer boxes of an MP4 reach beyond its end (ISO/IEC 14496-12, 4.2); None of another container."""
    try:
        with open_plain(path) as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            if file.read(8)[4:] not in _FIRST_BOXES:
                return None
            while at < size:
                file.seek(at)
                head = file.read(16)
                length = int.from_bytes(head[:4], "big")
                if length == 1:
                    length = int.from_bytes(head[8:], "big")
                if length < 8:  # 0 = up to the end of the file; what else is no box
                    return False
                at += length
            return at > size
    except OSError:
        return None
