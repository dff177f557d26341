"""Network camera for tests, which stalls, breaks off and returns; its JPEG frames carry their number."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cv2

from tests.deploy.inference.sources.made_sources import barcode
from tests.raw_server import read_request, serving

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
