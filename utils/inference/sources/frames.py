"""What comes from a source: frames, and events such as a gap in a stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from tessera.utils.bit_depth import Pixels

Media = Literal["picture", "video", "stream"]
Kind = Literal["opened", "gap", "reconnected", "ended", "damaged", "unreadable"]

_NAME = PurePath("image")


class VideoFacts(NamedTuple):
    """What a video or stream says of itself when it is opened; its size in pixels is after its rotation."""

    fps: float | None
    frames: int | None
    size_hw: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture, or one frame of a video or stream.

    Attributes:
        pixels: uint8 (H, W, 3) RGB, upright.
        source: what it is read from, as messages and results name it: a path, an address without its password, a
            camera's number, "-" for standard input.
        name: where its results go below a results folder: the path inside the folder that was given, such as
            a/1.jpg, else the file's name.
        frame: number from 0; None for a picture. It counts all frames of the video or stream, those of a stream that
            were dropped and those that `vid_stride` leaves out too.
        time_s: seconds since the video's start, by its presentation time stamps; for a stream seconds from its opening
            to the frame's arrival. None for a picture.
        wall_s: when a frame of a stream arrived, in seconds of Unix time; None for pictures and videos.
        dropped: frames of a stream that have been replaced by newer ones since the Frame before.
    """

    pixels: Pixels
    source: str
    media: Media = "picture"
    name: PurePath = _NAME
    frame: int | None = None
    time_s: float | None = None
    wall_s: float | None = None
    dropped: int = 0


@dataclass(frozen=True)
class SourceEvent:
    """Something that happened to a source.

    Attributes:
        source, media, name: as in Frame.
        kind: "opened": a video or stream delivers. "gap": no frame came from a stream for a while, or the connection
            broke. "reconnected": it is there again. "ended": the video is over, or the stream was given up. "damaged":
            a video or a picture's file ended before its end; what was read stays. "unreadable": nothing, or nothing
            more, can be read.
        message: one line that names the source.
        frame: number of the next frame; None for a picture.
        time_s, wall_s: as in Frame; of a video the time of its last frame.
        seconds: how long a gap was, or has been so far.
        facts: of a video or stream that was opened.
    """

    source: str
    kind: Kind
    message: str
    media: Media = "picture"
    name: PurePath = _NAME
    frame: int | None = None
    time_s: float | None = None
    wall_s: float | None = None
    seconds: float | None = None
    facts: VideoFacts | None = None

    @property
    def is_failure(self) -> bool:
        """Whether something could not be read."""
        return self.kind in ("damaged", "unreadable")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a line of JSON; what is None is left out."""
        found = {
            "event": self.kind,
            "source": self.source,
            "message": self.message,
            "frame": self.frame,
            "time_s": None if self.time_s is None else round(self.time_s, 6),
            "wall_s": None if self.wall_s is None else round(self.wall_s, 3),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
        }
        return {key: value for key, value in found.items() if value is not None}
