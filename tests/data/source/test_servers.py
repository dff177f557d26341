"""Downloads from hostile servers: silent ones, and answers that are not HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.data.source import download
from tessera.data.source.download import NetworkLimits, fetch
from tessera.utils.errors import UserError
from tests.raw_server import raw_server

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMITS", NetworkLimits(2, 0.01, 0.5))


def test_a_silent_server_times_out(tmp_path: Path) -> None:
    with (
        raw_server([OK + b'ETag: "a"\r\nContent-Length: 1000\r\n\r\n', b"x", 60.0]) as server,
        pytest.raises(UserError, match=r"timed out.*command again to resume"),
    ):
        fetch(server.url, tmp_path / "data.zip")
    assert len(server.requests) <= 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://a:99999999/\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 64 + b"/\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://a/b\r\n\r\n", "redirects to no address"),
        (b"HTTP/1.1 302 Found\r\nLocation: SELF?" + b"x" * 5000 + b"\r\n\r\n", "more than 10 times"),
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
