"""Wrapper of cv2.VideoCapture for videos, cameras and streams, equal in all OpenCV versions."""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager
from typing import cast

import numpy as np

from tessera.data.source.image_header import read_header, require_decodable_size
from tessera.deploy.inference.sources.frames import VideoFacts
from tessera.utils.bit_depth import Pixels
from tessera.utils.machine.opencv import cv2, utf8_path

_MJPEG = cv2.VideoWriter.fourcc(*"MJPG")
_LEAST_FRAME = 0.75  # fraction of the video's pixels; an interlaced field has half of them
_MOST_FPS, _MOST_FRAMES = 10_000, 1 << 40  # larger values in a header are wrong


class Capture(AbstractContextManager["Capture"]):
    """A video, camera or stream: absolute path or URL for FFmpeg, or a camera's number; check `is_open`."""

    def __init__(self, where: str | int, *, open_s: float | None = None, read_s: float | None = None) -> None:
        self._capture = cv2.VideoCapture()
        self._motion_jpeg = False
        if isinstance(where, int):
            self._capture.open(where, cv2.CAP_V4L2 if sys.platform == "linux" else cv2.CAP_ANY)
        else:
            parameters: list[int] = []
            for name, seconds in ((cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_s), (cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_s)):
                parameters += [] if seconds is None else [name, max(round(seconds * 1000), 1)]
            with utf8_path(where) as known:
                self._capture.open(known, cv2.CAP_FFMPEG, parameters)
                self._motion_jpeg = self.is_open and self._is_motion_jpeg(known if open_s is None else None)
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
        """Return the last grabbed frame, uint8 (H, W, 3) BGR, upright; None where it does not decode.

        Motion JPEG frames keep their own sizes; frames of other codecs have the size of the first.
        """
        found, pixels = self._capture.retrieve()
        if not found:
            return None
        if self._motion_jpeg:
            return _decoded(np.asarray(pixels))
        return cast(Pixels, pixels)

    def __exit__(self, *error: object) -> None:
        self._capture.release()

    def _is_motion_jpeg(self, path: str | None) -> bool:
        """Return whether this is Motion JPEG, and switch to raw packets: FFmpeg would scale all frames to one size.

        A file of interlaced fields, whose first header states half the height, is left to FFmpeg.
        """
        turned = self._capture.get(cv2.CAP_PROP_ORIENTATION_META)
        if int(self._capture.get(cv2.CAP_PROP_FOURCC)) != _MJPEG or turned:
            return False
        if path is not None:
            pixels = _first_frame_pixels(path)
            if pixels is None or pixels < _LEAST_FRAME * math.prod(self.facts.size_hw):
                return False
        return bool(self._capture.set(cv2.CAP_PROP_FORMAT, -1))


def _first_frame_pixels(path: str) -> int | None:
    """Return the pixels of the first Motion JPEG frame with a valid header; None = none."""
    probe = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_FORMAT, -1])
    try:
        while True:
            found, packet = probe.read()
            if not found:
                return None
            if header := read_header(np.asarray(packet).tobytes()):
                return header.pixels
    finally:
        probe.release()


def _decoded(packet: Pixels) -> Pixels | None:
    """Decode a Motion JPEG frame; None where it does not decode or exceeds the limit of images."""
    try:
        require_decodable_size(read_header(packet.tobytes()), packet.size)
        return cast(Pixels | None, cv2.imdecode(packet, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION))
    except (ValueError, cv2.error):
        return None


def rgb_of(bgr: Pixels) -> Pixels:
    """Convert a frame to RGB in place."""
    return cast(Pixels, cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr))
