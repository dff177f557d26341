"""Helpers for tests of sources: items, frames that carry their number, and a network camera that stalls and returns."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tessera.data.source.decode import read_image
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.sources import open_sources
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError
from tests.raw_server import read_request, serving


def read(source: Path | bytes) -> Pixels:
    if isinstance(source, Path):
        return read_image(source)
    image = cv2.imdecode(np.frombuffer(source, np.uint8), cv2.IMREAD_COLOR) if source else None
    if image is None:
        raise UserError("the bytes do not decode")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def items(specs: Any, **options: Any) -> list[Frame | SourceEvent]:
    with open_sources(specs, read=read, **options) as sources:
        return list(sources)


def frames(found: Iterable[Frame | SourceEvent]) -> list[Frame]:
    return [item for item in found if isinstance(item, Frame)]


def events(found: Iterable[Frame | SourceEvent]) -> list[SourceEvent]:
    return [item for item in found if isinstance(item, SourceEvent)]


def kinds(found: Iterable[Frame | SourceEvent]) -> list[str]:
    return [event.kind for event in events(found)]


BITS, STRIPE, HEIGHT = 12, 16, 64
WIDTH = BITS * STRIPE


def barcode(number: int) -> Pixels:
    """uint8 (64, 192, 3) whose vertical stripes are the bits of a number, the lowest one on the left."""
    bits = np.array([number >> bit & 1 for bit in range(BITS)], np.uint8) * 255
    return np.broadcast_to(np.repeat(bits, STRIPE)[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def number_of(pixels: Pixels) -> int:
    """What `barcode` has written, whatever a codec has made of it."""
    assert pixels.shape == (HEIGHT, WIDTH, 3), pixels.shape
    levels = pixels[HEIGHT // 4 : -HEIGHT // 4].mean(axis=(0, 2)).reshape(BITS, STRIPE)[:, 4:-4].mean(axis=1)
    return sum(1 << bit for bit in range(BITS) if levels[bit] > 127)


def write_video(path: Path, numbers: Iterable[int], fps: float = 10, codec: str = "mp4v") -> Path:
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*codec), fps, (WIDTH, HEIGHT))
    assert writer.isOpened()
    for number in numbers:
        writer.write(barcode(number))
    writer.release()
    return path


HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n"
Step = int | float  # so many frames; so many seconds of silence
REFUSE: tuple[Step, ...] = ()


class _Handler(socketserver.BaseRequestHandler):
    server: MjpegServer

    def handle(self) -> None:
        request = read_request(self)
        if not request:
            return
        if b"User-Agent: tessera" in request:  # asks what this is, and has no use for frames
            self.request.sendall(HEAD)
            return
        with contextlib.suppress(OSError):  # the other side has left
            self._play(self.server.next_plan())

    def _play(self, plan: Sequence[Step]) -> None:
        if plan:
            self.request.sendall(HEAD)
        for step in plan:
            if isinstance(step, float):
                if self.server.over.wait(step):
                    return
                continue
            for _ in range(step):
                if self.server.over.wait(self.server.pause_s):
                    return
                self.request.sendall(self.server.next_frame())


class MjpegServer(socketserver.ThreadingTCPServer):
    """Answers each connection by the next of its plans, and refuses all after the last."""

    daemon_threads = True

    def __init__(self, plans: Sequence[Sequence[Step]], pause_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plans, self.pause_s, self.over = list(plans), pause_s, threading.Event()
        self.sent = self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/video"

    def next_plan(self) -> Sequence[Step]:
        self.connections += 1
        return self.plans.pop(0) if self.plans else REFUSE

    def next_frame(self) -> bytes:
        _, jpeg = cv2.imencode(".jpg", barcode(self.sent))
        self.sent += 1
        body = jpeg.tobytes()
        return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(body), body)


@contextmanager
def mjpeg_server(*plans: Sequence[Step], pause_s: float = 0.01) -> Iterator[MjpegServer]:
    """A server on loopback.

    Args:
        plans: of each connection: an int sends so many frames, a float is silent for so many seconds; at its end the
            connection is closed.
        pause_s: between two frames.
    """
    with MjpegServer(plans, pause_s) as server, serving(server, server.over):
        yield server
