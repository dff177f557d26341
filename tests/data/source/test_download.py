"""Downloads against a real server that misbehaves on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.source.download import Patience, fetch
from tests.at_once import at_once
from utils.errors import UserError

BODY = np.random.default_rng(0).bytes(300_000)
QUICK: dict[str, Any] = {"progress": False, "patience": Patience(backoff_s=0.01, timeout_s=5.0)}


def patient(attempts: int) -> dict[str, Any]:
    """As QUICK, with another number of attempts."""
    return {**QUICK, "patience": replace(QUICK["patience"], attempts=attempts)}


class Server(ThreadingHTTPServer):
    """Serves `body` at any path.

    Attributes:
        body, etag: the file.
        break_after: bytes after which a connection is dropped, one number a request; None = not.
        ranges: whether Range is understood.
        status: answers before the real one.
        length: whether Content-Length is sent.
        location: where to redirect to, once.
        seen: Range header of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.etag = BODY, '"one"'
        self.break_after: list[int | None] = []
        self.ranges, self.length = True, True
        self.status: list[int] = []
        self.location: str | None = None
        self.seen: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.seen.append(wanted)
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


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_whole_file_and_nothing_else(server: Server, tmp_path: Path) -> None:
    target = fetch(server.url, tmp_path / "deep" / "data.zip", **QUICK)
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]


def test_present_target_is_not_fetched(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.zip").write_bytes(b"mine")
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == b"mine"
    assert server.seen == []


def test_an_interrupted_transfer_is_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000, 50_000]
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY
    assert server.seen == [None, "bytes=100000-", "bytes=150000-"]


def test_progress_renews_the_attempts(server: Server, tmp_path: Path) -> None:
    server.break_after = [30_000] * 9
    assert fetch(server.url, tmp_path / "data.zip", **patient(2)).read_bytes() == BODY


def test_the_next_call_resumes(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000]
    with pytest.raises(UserError, match="the connection ended after 100,000 of 300,000 bytes"):
        fetch(server.url, tmp_path / "data.zip", **patient(1))
    assert not (tmp_path / "data.zip").exists()
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY
    assert server.seen == [None, "bytes=100000-"]


def test_part_of_another_address_is_not_continued(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000]
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip", **patient(1))
    fetch(server.url + "?v=2", tmp_path / "data.zip", **QUICK)
    assert server.seen == [None, None]


def test_complete_part_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.break_after = [len(BODY) - 1]
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip", **patient(1))
    with (tmp_path / "data.zip.part").open("ab") as part:
        part.write(BODY[-1:])
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY
    assert len(server.seen) == 1


@pytest.mark.parametrize("etag", ['"two"', ""])
def test_changed_file_is_not_joined(server: Server, tmp_path: Path, etag: str) -> None:
    server.etag = '"one"' if etag else ""
    server.break_after = [100_000]
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip", **patient(1))
    server.etag, server.body = etag, BODY[::-1][:-7]
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == server.body


def test_shorter_file_starts_over(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000]
    server.etag = ""
    with pytest.raises(UserError):
        fetch(server.url, tmp_path / "data.zip", **patient(1))
    server.body = BODY[:5000]
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == server.body


def test_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.break_after = [100_000]
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY


def test_server_without_ranges_does_not_keep_us_for_ever(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.break_after = [100_000] * 50
    with pytest.raises(UserError, match="connection"):
        fetch(server.url, tmp_path / "data.zip", **QUICK)
    assert len(server.seen) <= 4


def test_unknown_length(server: Server, tmp_path: Path) -> None:
    server.length = False
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY


def test_transient_answers_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.status = [503, 429]
    assert fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes() == BODY


@pytest.mark.parametrize(("status", "what"), [(404, "404.*Check the address"), (403, "403.*your access")])
def test_refusals_are_final(server: Server, tmp_path: Path, status: int, what: str) -> None:
    server.status = [status]
    with pytest.raises(UserError, match=what):
        fetch(server.url, tmp_path / "data.zip", **QUICK)
    assert len(server.seen) == 1


@pytest.mark.parametrize("length", [True, False])
def test_size_limit(server: Server, tmp_path: Path, length: bool) -> None:
    server.length = length
    with pytest.raises(UserError, match="limit of 1,000"):
        fetch(server.url, tmp_path / "data.zip", max_bytes=1000, **QUICK)
    assert not (tmp_path / "data.zip").exists()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/a.zip", "data.zip", "http://"])
def test_only_http(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="starts with http"):
        fetch(url, tmp_path / "data.zip", **QUICK)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/data.zip"])
def test_redirect_to_another_scheme_is_refused(server: Server, tmp_path: Path, location: str) -> None:
    server.location = location
    with pytest.raises(UserError, match=r"redirects to 'ftp|Redirection to url 'file"):
        fetch(server.url, tmp_path / "data.zip", **QUICK)


def test_nobody_listens(server: Server, tmp_path: Path) -> None:
    with Server() as other:
        url = other.url
    with pytest.raises(UserError, match=r"Cannot download .*Check the network"):
        fetch(url, tmp_path / "data.zip", **QUICK)


def test_target_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="Cannot write"):
        fetch(server.url, tmp_path / "file" / "data.zip", **QUICK)


def test_two_at_once(server: Server, tmp_path: Path) -> None:
    results = at_once([lambda: fetch(server.url, tmp_path / "data.zip", **QUICK).read_bytes()] * 4)
    assert results == [BODY] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["data.zip"]
