"""A web server that sends any bytes at any pace."""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            received = self.request.recv(65536)
            if not received:
                return
            request += received
        self.server.requests.append(request)
        with contextlib.suppress(OSError):  # the other side has had enough
            for piece in self.server.pieces:
                if self.server.over.is_set():
                    return
                if isinstance(piece, bytes):
                    self.request.sendall(piece.replace(b"SELF", self.server.url.encode()))
                else:
                    time.sleep(piece)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, pieces: Iterable[bytes | float]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pieces, self.over = pieces, threading.Event()
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.zip"


@contextmanager
def raw_server(pieces: Iterable[bytes | float]) -> Iterator[_Server]:
    """A server that answers each request with these bytes and these pauses in seconds; SELF in them is its address."""
    with _Server(pieces) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
