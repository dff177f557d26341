"""Items of a source: frames, and events such as a gap in a stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from tessera.utils.bit_depth import Pixels

Media = Literal["image", "video", "stream"]
Kind = Literal["opened", "gap", "reconnected", "ended", "damaged", "unreadable"]

_NAME = PurePath("image")


class VideoFacts(NamedTuple):
    """Properties of an opened video or stream; its size is in pixels after rotation."""

    fps: float | None
    frames: int | None
    size_hw: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Frame:
    """One image, or one frame of a video or stream."""

    pixels: Pixels  # uint8 (H, W, 3) RGB, upright
    source: str  # path, URL without its password, camera number, or "-" for standard input
    media: Media = "image"
    name: PurePath = _NAME  # relative output path: the path inside the given folder, such as a/1.jpg, or the file name
    frame: int | None = None  # number from 0, counting dropped and skipped frames too; None for an image
    # Presentation time of a video frame; for a stream, seconds from its opening to the arrival; None for an image.
    time_s: float | None = None
    wall_s: float | None = None  # Unix time at which a stream frame arrived; None for images and videos
    dropped: int = 0  # stream frames that newer ones replaced since the previous Frame


@dataclass(frozen=True)
class SourceEvent:
    """An event of a source.

    Attributes:
        source, media, name: as in Frame.
        kind: "opened": the first frame of a video or stream arrived. "gap": a stream stalled or lost its connection.
            "reconnected": it is back. "ended": the video is over, or the stream was given up. "damaged": a file is
            truncated; what was read stays. "unreadable": nothing, or nothing more, can be read.
        time_s, wall_s: as in Frame; of a video, the time of its last frame.
    """

    source: str
    kind: Kind
    message: str  # one line that names the source
    media: Media = "image"
    name: PurePath = _NAME
    frame: int | None = None  # number of the next frame; None for an image
    time_s: float | None = None
    wall_s: float | None = None
    seconds: float | None = None  # length of a gap so far
    facts: VideoFacts | None = None  # of an opened video or stream

    @property
    def is_failure(self) -> bool:
        return self.kind in ("damaged", "unreadable")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a line of JSON, without those that are None."""
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
