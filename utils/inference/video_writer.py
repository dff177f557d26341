"""Results on a video become a video of the same length and frame rate, without its sound."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import cast

from utils.errors import UserError
from utils.inference.sources.frames import Pixels
from utils.machine.opencv import cv2
from utils.text import shown

log = logging.getLogger(__name__)

_CODEC = "mp4v"  # in every build of OpenCV's FFmpeg, and played everywhere
_LONGEST_STILL_S = 10.0  # a longer gap is shortened to this
_DEFAULT_FPS = 25.0
_FASTEST_FPS = 240.0


class VideoWriter:
    """An MP4 file that is there when it is closed; a frame is shown at the time that it had in the source.

    MP4 files of OpenCV have a constant rate: a frame is repeated until the time of the next one, and of two that fall
    on one place the first is written. Gaps of more than ten seconds, as streams have them, become ten seconds.

    Args:
        path: the file, whose folder exists; it is replaced.
        fps: frames a second, those of the source divided by the stride; None = 25.
    """

    _said_of_sound = False

    def __init__(self, path: Path, fps: float | None) -> None:
        self.path, self.fps = path, min(fps or _DEFAULT_FPS, _FASTEST_FPS)
        self._part = path.with_name(f".{path.stem}.part.mp4")
        self._writer: cv2.VideoWriter | None = None
        self._size_wh = (0, 0)
        self._last: Pixels | None = None
        self._written = 0
        self._start_s: float | None = None
        self._cut_s = 0.0

    def write(self, pixels: Pixels, time_s: float | None = None) -> None:
        """Add a frame.

        Args:
            pixels: uint8 (H, W, 3) RGB; of another size than the first one it is resized to that.
            time_s: when it is shown, as in Frame; None = right after the one before.

        Raises:
            UserError: no video can be written there.
        """
        if self._writer is None:
            self._writer = self._open(pixels)
        place = self._place(time_s)
        if place < self._written:
            return
        if self._last is not None:
            for _ in range(place - self._written):
                self._writer.write(self._last)
        bgr = cast(Pixels, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
        if (bgr.shape[1], bgr.shape[0]) != self._size_wh:
            bgr = cast(Pixels, cv2.resize(bgr, self._size_wh, interpolation=cv2.INTER_AREA))
        self._writer.write(bgr)
        self._last, self._written = bgr, place + 1

    def close(self) -> None:
        """Finish the file; nothing is left where no frame was written."""
        if self._writer is not None:
            self._writer.release()
            self._writer = self._last = None
            self._part.replace(self.path)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, pixels: Pixels) -> cv2.VideoWriter:
        # Both sides even, as the codec wants them: an odd one loses its last row or column.
        height, width = (max(side // 2 * 2, 2) for side in pixels.shape[:2])
        self._size_wh = (width, height)
        code = cv2.VideoWriter.fourcc(*_CODEC)
        writer = cv2.VideoWriter(str(self._part), cv2.CAP_FFMPEG, code, self.fps, self._size_wh)
        if not writer.isOpened():
            raise UserError(
                f"{shown(self.path)}: this OpenCV cannot write the video ({_CODEC}, {width} x {height} pixels). Check "
                "that the folder can be written to, or give --nosave."
            )
        if not VideoWriter._said_of_sound:
            VideoWriter._said_of_sound = True
            log.info("Videos are written without their sound.")
        return writer

    def _place(self, time_s: float | None) -> int:
        """The number of the frame that is shown at a time."""
        if time_s is None:
            return self._written
        if self._start_s is None:
            self._start_s = time_s
        place = round((time_s - self._start_s - self._cut_s) * self.fps)
        most = self._written + round(_LONGEST_STILL_S * self.fps)
        if place > most:
            self._cut_s += (place - most) / self.fps
            place = most
        return place
