"""Downloads from hostile servers: slow ones, endless ones, and answers that are not HTTP."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.data.source.download import fetch
from tessera.utils import http_client
from tessera.utils.errors import UserError
from tessera.utils.http_client import NetworkLimits
from tests.raw_server import raw_server

OK = b"HTTP/1.1 200 OK\r\n"
TRICKLE = [b"x", 0.05] * 1000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LIMITS", NetworkLimits(2, 0.01, 2.0, least_speed=1e5, slack_s=0.3))


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 1000\r\n\r\n", *TRICKLE],
        [OK + b"\r\n", *TRICKLE],
        [OK + b'ETag: "a"\r\nContent-Length: 1000\r\n\r\n', b"x", 60.0],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n", *[b"0", 0.05] * 1000],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", *[b"A: b\r\n", 0.05] * 1000],
        [OK + b"X: ", *TRICKLE],
        [*TRICKLE],
    ],
    ids=["body", "body of any length", "silence", "length of a chunk", "trailers", "header", "status"],
)
def test_a_server_that_trickles_is_given_up(
    tmp_path: Path, pieces: list[bytes | float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "LIMITS", replace(http_client.LIMITS, head_s=0.3))
    with (
        raw_server(pieces) as server,
        pytest.raises(UserError, match=r"less than 100,000 bytes a second|timed out|not there after 0.3 s") as error,
    ):
        fetch(server.url, tmp_path / "data.zip")
    is_named = isinstance(pieces[0], bytes) and b"ETag" in pieces[0]  # else a later request could be for another file
    assert ("command again to resume" in str(error.value)) == is_named
    assert len(server.requests) <= 4


def test_the_total_time_is_bounded_by_the_size(tmp_path: Path) -> None:
    """One new byte a connection is progress each time."""
    with raw_server([OK + b"Content-Length: 30000\r\n\r\nx"]) as server, pytest.raises(UserError, match="connection"):
        fetch(server.url, tmp_path / "data.zip")
    assert server.requests


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "not an address|Invalid IPv6"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://a:99999999/\r\n\r\n", "Port out of range"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 64 + b"/\r\n\r\n", "not an address"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://a/b\r\n\r\n", "starts with http|which is not|not allowed"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF?" + b"x" * 5000 + b"\r\n\r\n", "at most 4,096"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF\r\n\r\n", "more than 10 times"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF\r\nContent-Length: 99999999\r\n\r\n" + bytes(999), "than 10 times"),
        (b"HTTP/1.1 404 \x1b[31m" + b"x" * 9999 + b"\r\n\r\n", r"404 \\x1b\[31mxxx.*Check the address"),
        (b"HTTP/1.1 99999999 no\r\n\r\n", "broke"),
        (b"SSH-2.0-OpenSSH\r\n", "broke"),
        (OK + b"Content-Length: " + b"9" * 6000 + b"\r\n\r\n", ""),
        (OK + b"Content-Encoding: GZip\r\n\r\n", r"sends it encoded \(gzip\), expected identity"),
        (OK + b"Content-Length: -5\r\n\r\nabc", ""),
        (OK + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n", "broke"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nmany\r\n", "broke"),
        (OK + b"ETag: \x01\r\nContent-Length: 99\r\n\r\nabc", "ended after 3 of 99"),
    ],
)  # fmt: skip
def test_answers_that_are_not_http(tmp_path: Path, answer: bytes, message: str) -> None:
    with raw_server([answer]) as server:
        try:
            fetch(server.url, tmp_path / "data.zip")
        except UserError as error:
            assert len(str(error)) < 800 and str(error).replace("\n", "").isprintable()
            found = str(error)
        else:
            found = ""
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://a:b/", "http://a:99999/", "http://a/\x1b[31m", "http://a b/", "http://é/", "http://.../",
     f"http://{'a' * 64}/", f"http://a/{'b' * 5000}", "http://a\ud800/", "https://@/", "http://a/\u202e",
     "file:///etc/passwd", "ftp://a/b.zip"],
)  # fmt: skip
def test_addresses_that_are_none(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="Cannot download") as error:
        fetch(url, tmp_path / "data.zip")
    assert str(error.value).isprintable() and len(str(error.value)) < 400
