"""Video files: frames with numbers and presentation times, and detection of truncated files."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

from tessera.deploy.inference.sources.frames import Frame, Kind, SourceEvent, VideoFacts
from tessera.deploy.inference.sources.source_arguments import Origin
from tessera.utils.bit_depth import Pixels
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2, utf8_path
from tessera.utils.text import first_line, one_line, plural

_MOST_FPS, _MOST_FRAMES = 10_000, 1 << 40  # larger values in a header are wrong
# Allowed difference from the stated length: containers without a frame count state the sound's length, or a guess.
_SLACK_S, _SLACK, _SLACK_FRAMES = 0.5, 0.05, 1.5
_LONGEST_HEADER = 1 << 26  # bytes


class Capture(AbstractContextManager["Capture"]):
    """A video, camera or stream: absolute path or URL for FFmpeg, or a camera's number; check `is_open`."""

    def __init__(self, where: str | int, *, open_s: float | None = None, read_s: float | None = None) -> None:
        self._capture = cv2.VideoCapture()
        if isinstance(where, int):
            self._capture.open(where, cv2.CAP_V4L2 if sys.platform == "linux" else cv2.CAP_ANY)
        else:
            parameters: list[int] = []
            for name, seconds in ((cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_s), (cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_s)):
                parameters += [] if seconds is None else [name, max(round(seconds * 1000), 1)]
            with utf8_path(where) as known:
                self._capture.open(known, cv2.CAP_FFMPEG, parameters)
        # The default differs between versions.
        self._capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)

    @property
    def is_open(self) -> bool:
        return bool(self._capture.isOpened())

    @property
    def facts(self) -> VideoFacts:
        fps, frames = (self._capture.get(prop) for prop in (cv2.CAP_PROP_FPS, cv2.CAP_PROP_FRAME_COUNT))
        height, width = (self._capture.get(prop) for prop in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
        return VideoFacts(
            fps=fps if math.isfinite(fps) and 0 < fps <= _MOST_FPS else None,
            frames=int(frames) if 0 < frames < _MOST_FRAMES else None,
            size_hw=(int(height), int(width)),
        )

    @property
    def time_s(self) -> float:
        """Presentation time of the last grabbed frame in seconds; 0 = none."""
        return float(self._capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000

    def grab(self) -> bool:
        """Decode the next frame; False at the end or after a timeout."""
        return bool(self._capture.grab())

    def retrieve(self) -> Pixels | None:
        """Return the last grabbed frame, uint8 (H, W, 3) BGR, upright, of the first one's size; None = undecodable."""
        found, pixels = self._capture.retrieve()
        return cast(Pixels, pixels) if found else None

    def __exit__(self, *error: object) -> None:
        self._capture.release()


def rgb_of(bgr: Pixels) -> Pixels:
    """Convert a frame to RGB in place."""
    return cast(Pixels, cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr))


def read_video(origin: Origin, vid_stride: int = 1, path: str = "") -> Iterator[Frame | SourceEvent]:
    """Yield the frames of a video between the events "opened" and "ended".

    The last event is "unreadable" where nothing decodes, and "damaged" where the video is truncated. Skipped frames are
    decoded, but not converted. `path` replaces that of the origin.
    """
    path = os.path.abspath(path or origin.where)  # noqa: PTH100 - FFmpeg would read a relative a:b as a protocol
    place, number, time_s = origin.place, 0, 0.0

    def event(kind: Kind, message: str, facts: VideoFacts | None = None) -> SourceEvent:
        line = f"{one_line(origin.source, 4096)}: {message}"
        return SourceEvent(origin.source, kind, line, "video", place, number, time_s, facts=facts)

    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        yield event("unreadable", f"cannot read the video ({why}). Restore or remove it.")
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
                    del frame  # frees memory while the next one is decoded
            number += 1
    if lost == len(range(0, number, vid_stride)):
        yield event("unreadable", "no frame of the video decodes.")
    elif stated := _truncation(path, facts, number, time_s):
        yield event("damaged", f"damaged: it ends after {plural(number - lost, 'frame')}, {stated} it states.")
    elif lost:
        yield event("damaged", f"damaged: {lost:,} of its {number:,} frames do not decode.")
    else:
        yield event("ended", f"ended after {plural(number, 'frame')}")


def _truncation(path: str, facts: VideoFacts, frames: int, time_s: float) -> str:
    """Return the stated length of a truncated video; "" where it is complete."""
    if facts.frames is None or frames >= facts.frames - 1:
        return ""
    header = _mp4_header(path)
    if facts.fps is None:  # its times are wrong
        return f"of the {facts.frames:,}" if header and frames < (1 - _SLACK) * facts.frames else ""
    whole_s = facts.frames / facts.fps
    stated_s = _edit_list_s(header, whole_s)
    if time_s > stated_s + _SLACK_S:
        stated_s = whole_s
    is_guess = not header or stated_s < (1 - _SLACK) * whole_s  # or a clip trimmed between two key frames
    slack_s = max(_SLACK_S if is_guess else _SLACK_FRAMES / facts.fps, _SLACK * stated_s)
    is_short = stated_s - time_s - 1 / facts.fps > slack_s
    return f"at {time_s:.2f} s of the {stated_s:.2f} s" if is_short else ""


def _mp4_header(path: str) -> bytes:
    """Return the content of the box moov of an MP4 or QuickTime file (ISO/IEC 14496-12, 4.2); b"" = none."""
    try:
        with open_plain(path) as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size:
                file.seek(at)
                head = file.read(16)
                length = int.from_bytes(head[8:] if head[:4] == b"\0\0\0\1" else head[:4], "big")
                if head[4:8] == b"moov" and length <= _LONGEST_HEADER:
                    return head[8:] + file.read(length - 16)
                if length < 8:
                    break
                at += length
    except (OSError, ValueError):
        pass
    return b""


def _edit_list_s(header: bytes, whole_s: float) -> float:
    """Return the seconds that the edit list of an MP4 header shows (8.6.6); `whole_s` without a consistent one.

    Boxes of version 1, with 64-bit times, are ignored.
    """

    def number(box: bytes, at: int) -> int:
        return int.from_bytes(box[at : at + 4], "big") if box[:1] == b"\0" else 0

    video = next((track for track in header.split(b"trak")[1:] if b"vide" in track), b"")
    movie, media, edits = header.partition(b"mvhd")[2], video.partition(b"mdhd")[2], video.partition(b"elst")[2]
    if not number(movie, 12) or not number(media, 12):
        return whole_s
    media_s = number(media, 16) / number(media, 12)
    entries = range(8, 8 + 12 * min(number(edits, 4), 10_000), 12)
    shown_s = sum(number(edits, at) for at in entries if number(edits, at + 4) != 0xFFFFFFFF) / number(movie, 12)
    is_sound = (
        abs(whole_s - media_s) <= _SLACK * media_s + _SLACK_S and 0 < shown_s <= media_s * (1 + _SLACK) + _SLACK_S
    )
    return shown_s if is_sound else whole_s
