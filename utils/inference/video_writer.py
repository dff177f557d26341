"""Results on a video become a video of the same length and frame rate, without its sound."""

from __future__ import annotations

import errno
import logging
import re
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np

from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tessera.utils.files import part_of
from tessera.utils.inference.output_paths import unwritable
from tessera.utils.inference.sources.capture import Capture
from tessera.utils.machine.opencv import cv2, in_utf8
from tessera.utils.streams import words_of_libraries
from tessera.utils.text import shown

log = logging.getLogger(__name__)

_H264, _MPEG4 = "avc1", "mp4v"  # what browsers play; what every build of OpenCV's FFmpeg writes
_PROBED_PX = 64
_LONGEST_STILL_S = 10.0  # a longer gap is shortened to this
_DEFAULT_FPS = 25.0
_FASTEST_FPS = 240.0
_WRITTEN_AS = {
    _H264: "as H.264",
    _MPEG4: "as MPEG-4 Part 2, which browsers do not play: this OpenCV has no encoder for H.264 that takes them "
    "(ffmpeg -i in.mp4 out.mp4 converts)",
}
# Of OpenCV and FFmpeg, where another program loaded them.
_WORDS = re.compile(rb"OpenCV|OpenH264|\[.*(?: @ 0x|:\d+@)|\s")


class NoCodecError(UserError):
    """This video cannot be written; others can."""


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
        self.path, self.fps = path, min(max(fps or _DEFAULT_FPS, 1 / _LONGEST_STILL_S), _FASTEST_FPS)
        self._part = part_of(path, ".mp4")
        self._writer: cv2.VideoWriter | None = None
        self._size_wh = (0, 0)
        self._last: Pixels | None = None
        self._written = 0
        self._start_s: float | None = None
        self._cut_s = 0.0

    def write(self, pixels: Pixels, time_s: float | None = None) -> None:
        """Add a frame, uint8 (H, W, 3) RGB; of another size than the first one it is fitted in, black beside it.

        It is shown at `time_s`, as in Frame; None = right after the one before.

        Raises:
            UserError: the folder takes no file; NoCodecError where no codec takes frames of this size.
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
            bgr = _fitted(bgr, *self._size_wh)
        self._writer.write(bgr)
        self._last, self._written = bgr, place + 1

    def close(self) -> None:
        """Finish the file; nothing is left where no frame was written.

        Raises:
            UserError: it is not whole: FFmpeg's writer ignores what the system says of a disk that is full.
        """
        if self._writer is None:
            return
        self._writer.release()
        self._writer = self._last = None
        try:
            if (found := _frames_of(self._part)) < self._written:
                raise OSError(errno.EIO, f"{found:,} of its {self._written:,} frames are there: the disk is full?")
            self._part.replace(self.path)
        except OSError as error:
            with suppress(OSError):  # a folder that is gone has no part in it
                self._part.unlink()
            raise unwritable(self.path, error) from error

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, pixels: Pixels) -> cv2.VideoWriter:
        # Both sides even, as the codec wants them: an odd one loses its last row or column.
        height, width = (max(side // 2 * 2, 2) for side in pixels.shape[:2])
        self._size_wh = (width, height)
        try:
            self._part.touch()
        except OSError as error:
            raise unwritable(self.path, error) from error
        codecs = [_H264, _MPEG4] if _writes_h264() else [_MPEG4]
        for codec in codecs:
            writer = _writer(self._part, codec, self.fps, self._size_wh)
            if writer.isOpened():
                break
        else:
            self._part.unlink(missing_ok=True)
            raise NoCodecError(
                f"{shown(self.path)}: the video is not written, this OpenCV has no codec for {width} x {height} pixels."
            )
        if not VideoWriter._said_of_sound:
            VideoWriter._said_of_sound = True
            log.info(f"Videos are written without their sound, {_WRITTEN_AS[codec]}.")
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


@cache
def _writes_h264() -> bool:
    """Whether this OpenCV has an encoder for H.264 that works here: tried once, without what its FFmpeg prints."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, words_of_libraries(_WORDS):
        path = Path(folder) / "probe.mp4"
        writer = _writer(path, _H264, _DEFAULT_FPS, (_PROBED_PX, _PROBED_PX))
        for level in (0, 255):
            writer.write(np.full((_PROBED_PX, _PROBED_PX, 3), level, np.uint8))
        writer.release()
        return _frames_of(path) == 2


def _writer(path: Path, codec: str, fps: float, size_wh: tuple[int, int]) -> cv2.VideoWriter:
    with in_utf8(str(path)) as name:
        return cv2.VideoWriter(name, cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*codec), fps, size_wh)


def _frames_of(path: Path) -> int:
    """How many frames a video has by its header, which is written last; 0 where there is none."""
    with Capture(str(path)) as capture:
        return capture.facts.frames or 0 if capture.is_open and capture.grab() else 0


def _fitted(bgr: Pixels, whole_w: int, whole_h: int) -> Pixels:
    """Scale a frame into another size, with black beside it."""
    height, width = bgr.shape[:2]
    scale = min(whole_w / width, whole_h / height)
    w, h = (min(max(round(side * scale), 1), most) for side, most in ((width, whole_w), (height, whole_h)))
    left, top = (whole_w - w) // 2, (whole_h - h) // 2
    small = cv2.resize(bgr, (w, h), interpolation=cv2.INTER_AREA)
    return cast(
        Pixels,
        cv2.copyMakeBorder(small, top, whole_h - h - top, left, whole_w - w - left, cv2.BORDER_CONSTANT),
    )
