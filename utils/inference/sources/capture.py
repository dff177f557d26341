"""OpenCV's reader of videos, cameras and streams, with what its versions leave open said explicitly."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import cast

from utils.inference.sources.frames import Pixels, VideoFacts
from utils.machine.opencv import cv2

_MOST_FPS, _MOST_FRAMES = 10_000, 1 << 40  # beyond these a header states nonsense


class Capture:
    """A video, camera or stream that is open, or could not be opened.

    Args:
        where: an absolute path or an address for FFmpeg, or the number of a camera.
        open_s, read_s: of addresses, seconds after which opening and waiting for a frame are given up.
    """

    def __init__(self, where: str | int, *, open_s: float | None = None, read_s: float | None = None) -> None:
        self._capture = cv2.VideoCapture()
        if isinstance(where, int):
            self._capture.open(where, cv2.CAP_V4L2 if sys.platform == "linux" else cv2.CAP_ANY)
        else:
            parameters: list[int] = []
            for name, seconds in ((cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_s), (cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_s)):
                parameters += [] if seconds is None else [name, max(round(seconds * 1000), 1)]
            try:
                self._capture.open(where, cv2.CAP_FFMPEG, parameters)
            except UnicodeEncodeError:  # a file name that is not UTF-8 stays closed
                return
        # Frames come as they are shown, whatever this version's default is.
        self._capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return bool(self._capture.isOpened())

    @property
    def facts(self) -> VideoFacts:
        """What it says of itself."""
        fps, frames = (self._capture.get(prop) for prop in (cv2.CAP_PROP_FPS, cv2.CAP_PROP_FRAME_COUNT))
        height, width = (self._capture.get(prop) for prop in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
        return VideoFacts(
            fps=fps if math.isfinite(fps) and 0 < fps <= _MOST_FPS else None,
            frames=int(frames) if 0 < frames < _MOST_FRAMES else None,
            size_hw=(int(height), int(width)),
        )

    @property
    def time_s(self) -> float:
        """Presentation time of the frame that was grabbed last, in seconds from the start; 0 where it has none."""
        return float(self._capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000

    def grab(self) -> bool:
        """Decode the next frame; False where there is none, or none came in time."""
        return bool(self._capture.grab())

    def retrieve(self) -> Pixels | None:
        """The frame that was grabbed last, uint8 (H, W, 3) BGR, upright; None where it cannot be converted."""
        found, pixels = self._capture.retrieve()
        return cast(Pixels, pixels) if found else None

    def close(self) -> None:
        """Release the file, camera or connection."""
        self._capture.release()

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def rgb_of(bgr: Pixels) -> Pixels:
    """A frame of a capture, its own memory, turned to RGB in place."""
    return cast(Pixels, cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr))
