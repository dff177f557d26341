"""A web server of one file that breaks off, refuses or redirects on demand."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.raw_server import serving


class FileServer(ThreadingHTTPServer):
    """Serves `body` at any path; what it does besides is set by its attributes, and `seen` and `asked` say what came.

    `break_after` has the bytes after which connections are dropped, one number a request, and `status` answers before
    the real one.
    """

    daemon_threads = True

    def __init__(self, body: bytes, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if tls else "http"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.body, self.etag, self.pause_s = body, '"one"', 0.0
        self.break_after: list[int | None] = []
        self.ranges, self.length = True, True
        self.status: list[int] = []
        self.location: str | None = None
        self.seen: list[str | None] = []
        self.asked: list[str] = []

    @property
    def folder(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/"

    @property
    def url(self) -> str:
        return f"{self.folder}data.zip"

    @contextmanager
    def running(self) -> Iterator[FileServer]:
        with self, serving(self, threading.Event()):
            yield self


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.seen.append(wanted)
        server.asked.append(self.path)
        time.sleep(server.pause_s)
        if server.location:
            self.send_response(302)
            self.send_header("Location", server.location)
            self.end_headers()
            return
        if server.status:
            self.send_error(server.status.pop(0))
            return
        start = 0
        same = self.headers.get("If-Range") in (None, server.etag)
        if wanted and server.ranges and same:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(server.body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        content = server.body[start:]
        if server.length:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = server.break_after.pop(0) if server.break_after else None
        self.wfile.write(content[:cut])

    def log_message(self, format: str, *args: Any) -> None:
        pass
