"""Writer of annotated videos with the length and frame rate of the source, without sound."""

from __future__ import annotations

import errno
import logging
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, cast

import numpy as np

from tessera.deploy.inference.sources.video import Capture
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tessera.utils.files import open_temporary
from tessera.utils.machine.host import capture_library_output
from tessera.utils.machine.opencv import cv2, utf8_path
from tessera.utils.text import shown

log = logging.getLogger(__name__)

_H264, _MPEG4 = "avc1", "mp4v"  # browsers play the first; every build of OpenCV writes the second
_PROBED_PX = 64
_LONGEST_STILL_S = 10.0  # longer gaps are shortened to this
_DEFAULT_FPS = 25.0
_FASTEST_FPS = 240.0
_WRITTEN_AS = {
    _H264: "as H.264",
    _MPEG4: "as MPEG-4 Part 2, which browsers do not play: this OpenCV has no encoder for H.264 that takes them "
    "(ffmpeg -i in.mp4 out.mp4 converts)",
}
# Output of OpenCV and FFmpeg.
_WORDS = re.compile(rb"OpenCV|OpenH264|\[.*(?: @ 0x|:\d+@)|\s")


class NoCodecError(UserError):
    """No codec can write this video."""


class VideoWriter:
    """An MP4 file that appears when it is closed; frames keep their times.

    OpenCV writes a constant rate: a frame is repeated until the time of the next one, and of two at the same time the
    first is written. Gaps of more than ten seconds are shortened to ten. `fps` is that of the source divided by the
    stride; None = 25.
    """

    _said_of_sound = False

    def __init__(self, path: Path, fps: float | None) -> None:
        self.path, self.fps = path, min(max(fps or _DEFAULT_FPS, 1 / _LONGEST_STILL_S), _FASTEST_FPS)
        self._writer: cv2.VideoWriter | None = None
        self._lock: IO[bytes]  # of the temporary file, which OpenCV opens by its name
        self._part: Path
        self._size_wh = (0, 0)
        self._last: Pixels | None = None
        self._written = 0
        self._start_s: float | None = None
        self._cut_s = 0.0

    def write(self, pixels: Pixels, time_s: float | None = None) -> None:
        """Append a frame, uint8 (H, W, 3) RGB; one of another size than the first is letterboxed on black.

        `time_s` is as in Frame, None = right after the previous one. A UserError where the file cannot be written.
        """
        if self._writer is None:
            self._writer = self._open(pixels)
        place = self._frame_index(time_s)
        if place < self._written:
            return
        if self._last is not None:
            for _ in range(place - self._written):
                self._writer.write(self._last)
        bgr = cast(Pixels, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))
        if (bgr.shape[1], bgr.shape[0]) != self._size_wh:
            bgr = _letterboxed(bgr, *self._size_wh)
        self._writer.write(bgr)
        self._last, self._written = bgr, place + 1

    def close(self) -> None:
        """Finish the file; without frames there is none. A UserError where frames are missing.

        FFmpeg's writer ignores errors of a full disk, so that frames are counted.
        """
        if self._writer is None:
            return
        self._writer.release()
        self._writer = self._last = None
        try:
            with self._lock:
                self._finish()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _finish(self) -> None:
        try:
            if (found := _frames_of(self._part)) < self._written:
                raise OSError(errno.EIO, f"{found:,} of its {self._written:,} frames are there: the disk is full?")
            self._part.replace(self.path)
        finally:
            self._part.unlink(missing_ok=True)

    def _open(self, pixels: Pixels) -> cv2.VideoWriter:
        # Codecs require even sides: an odd one loses its last row or column.
        height, width = (max(side // 2 * 2, 2) for side in pixels.shape[:2])
        self._size_wh = (width, height)
        try:
            self._lock, self._part = open_temporary(self.path, ".mp4")
        except OSError as error:
            raise unwritable(self.path, error) from error
        codecs = [_H264, _MPEG4] if _writes_h264() else [_MPEG4]
        for codec in codecs:
            writer = _writer(self._part, codec, self.fps, self._size_wh)
            if writer.isOpened():
                break
        else:
            self._lock.close()
            self._part.unlink(missing_ok=True)
            raise NoCodecError(
                f"{shown(self.path)}: the video is not written, as OpenCV has no codec for {width} x {height} pixels."
            )
        if not VideoWriter._said_of_sound:
            VideoWriter._said_of_sound = True
            log.info(f"Videos are written without their sound, {_WRITTEN_AS[codec]}.")
        return writer

    def _frame_index(self, time_s: float | None) -> int:
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
    """Return whether OpenCV can encode H.264 here, tried once in silence."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder, capture_library_output(_WORDS):
        path = Path(folder) / "probe.mp4"
        writer = _writer(path, _H264, _DEFAULT_FPS, (_PROBED_PX, _PROBED_PX))
        for level in (0, 255):
            writer.write(np.full((_PROBED_PX, _PROBED_PX, 3), level, np.uint8))
        writer.release()
        return _frames_of(path) == 2


def _writer(path: Path, codec: str, fps: float, size_wh: tuple[int, int]) -> cv2.VideoWriter:
    with utf8_path(str(path)) as name:
        return cv2.VideoWriter(name, cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*codec), fps, size_wh)


def _frames_of(path: Path) -> int:
    """Return the number of frames in the header, which is written last; 0 without one."""
    with Capture(str(path)) as capture:
        return capture.facts.frames or 0 if capture.is_open and capture.grab() else 0


def _letterboxed(bgr: Pixels, whole_w: int, whole_h: int) -> Pixels:
    """Letterbox a frame on black."""
    height, width = bgr.shape[:2]
    scale = min(whole_w / width, whole_h / height)
    w, h = (min(max(round(side * scale), 1), most) for side, most in ((width, whole_w), (height, whole_h)))
    left, top = (whole_w - w) // 2, (whole_h - h) // 2
    small = cv2.resize(bgr, (w, h), interpolation=cv2.INTER_AREA)
    return cast(
        Pixels, cv2.copyMakeBorder(small, top, whole_h - h - top, left, whole_w - w - left, cv2.BORDER_CONSTANT)
    )


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{shown(path)}: cannot be written ({error.strerror}). Free space there, or give another --project."
    )
