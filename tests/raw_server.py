"""A web server that sends any bytes at any pace, and what others like it share."""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def read_request(handler: socketserver.BaseRequestHandler) -> bytes:
    """The head of a request; empty where the other side leaves before its end."""
    request = b""
    while b"\r\n\r\n" not in request:
        received = handler.request.recv(65536)
        if not received:
            return b""
        request += received
    return request


@contextmanager
def serving(server: socketserver.TCPServer, over: threading.Event) -> Iterator[None]:
    """Answer in a thread; `over` is set at the end, before the thread is waited for."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        over.set()
        server.shutdown()
        thread.join()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        request = read_request(self)
        if not request:
            return
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
    with _Server(pieces) as server, serving(server, server.over):
        yield server
