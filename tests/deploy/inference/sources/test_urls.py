"""Tests of URLs that respond with an image, a video, a stream, or something else."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tessera.data.source.decode import read_image
from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import NetworkLimits
from tessera.deploy.inference.sources import sources
from tessera.deploy.inference.sources.frames import Frame
from tessera.deploy.inference.sources.sources import read_address
from tessera.utils.errors import UserError
from tests.data.make import write_image
from tests.deploy.inference.sources.made_sources import events, frames, items, mjpeg_server, number_of, write_video
from tests.raw_server import raw_server

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMITS", NetworkLimits(attempts=2, pause_s=0.01, timeout_s=60))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where downloads lie, to see that none stays."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def answer(body: bytes, what: str = "image/png", *, with_length: bool = True) -> list[bytes | float]:
    length = f"Content-Length: {len(body)}\r\n" if with_length else ""
    return [OK + f"Content-Type: {what}\r\n{length}\r\n".encode() + body]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image(tmp_path_factory.mktemp("image") / "a.png")


@pytest.mark.parametrize(("what", "with_length"), [("image/png", True), ("text/plain", False)])
def test_an_image(image: Path, what: str, with_length: bool) -> None:
    with raw_server(answer(image.read_bytes(), what, with_length=with_length)) as server:
        address = server.url.replace("data.zip", "images/a%20b.png?token=1")
        (frame,) = items(address)
        assert len(server.requests) == 1
    assert isinstance(frame, Frame) and np.array_equal(frame.pixels, read_image(image))
    assert frame.source == address and frame.name.name == "a_b.png" and frame.media == "image"


def test_a_video_lies_in_a_temporary_file_while_it_is_read(tmp_path: Path, own_temporary_folder: Path) -> None:
    video = write_video(tmp_path / "a.mp4", range(12))
    with raw_server(answer(video.read_bytes(), "video/mp4")) as server:
        found = items(server.url)
        assert len(server.requests) == 1
    assert [event.kind for event in events(found)] == ["opened", "ended"]
    assert [number_of(frame.pixels) for frame in frames(found)] == list(range(12))
    assert {item.source for item in found} == {server.url}
    assert list(own_temporary_folder.iterdir()) == []


def test_a_stream_is_left_to_ffmpeg() -> None:
    with mjpeg_server() as server:
        assert read_address(server.url) is None
    live = [OK + b"Content-Type: video/mp2t\r\n\r\n", b"\x47" * 1000, 600.0]
    with raw_server(live) as other:
        assert read_address(other.url) is None, "a video without an end"
    with raw_server([]) as silent:
        assert read_address(f"{silent.url}.m3u8") is None and silent.requests == []


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (answer(b"<html></html>", "text/html"), "found type text/html, expected an image, video or stream"),
        (answer(b"\x1b[2J", "a/\x1b[31mb"), "found type "),
        ([b"HTTP/1.1 404 Not Found\r\n\r\n"], "404 Not Found"),
        ([b"HTTP/1.1 401 Unauthorized\r\n\r\n"], "401 Unauthorized"),
        (answer(b"", "image/png"), "do not decode"),
        (answer(b"no image", "image/png"), "do not decode"),
        (answer(b"no video" * 99, "video/mp4"), "found 792 bytes that do not decode"),
    ],
)  # fmt: skip
def test_invalid_responses(pieces: list[bytes | float], message: str, image: Path) -> None:
    with raw_server(pieces) as server:
        found = items([server.url, image])
    assert [isinstance(item, Frame) for item in found] == [False, True], "the rest goes on"
    (event,) = events(found)
    assert event.kind == "unreadable" and message in event.message and event.message.isprintable()
    assert event.source == server.url and server.url in event.message


def test_a_truncated_response_is_requested_again(image: Path) -> None:
    body = image.read_bytes()
    with raw_server([OK + b"Content-Length: %d\r\n\r\n" % len(body) + body[:200]]) as server:
        with pytest.raises(UserError, match=r"ended after 200 of .*Check the URL and the network"):
            read_address(f"{server.url}.png")
        assert len(server.requests) == download.LIMITS.attempts


@pytest.mark.parametrize(("limit", "suffix", "what"), [
    ("MOST_IMAGE_BYTES", ".png", "image/png"), ("MOST_VIDEO_BYTES", ".mp4", "video/mp4")
])  # fmt: skip
def test_a_limit(
    limit: str, suffix: str, what: str, monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    monkeypatch.setattr(sources, limit, 1000)
    body = b"\0\0\0\x18ftyp" + bytes(5000)
    with raw_server(answer(body, what)) as server, pytest.raises(UserError, match="more than the limit of 1,000 bytes"):
        read_address(server.url + suffix)
    assert list(own_temporary_folder.iterdir()) == []


def test_an_account_is_sent_but_not_shown_nor_given_to_others(image: Path) -> None:
    with raw_server(answer(image.read_bytes())) as other:
        with raw_server([f"HTTP/1.1 302 Found\r\nLocation: {other.url}\r\n\r\n".encode()]) as server:
            (item,) = items(server.url.replace("://", "://me:se%40cret@"))
            assert base64.b64encode(b"me:se@cret") in server.requests[0]
        assert b"uthorization" not in other.requests[0]
    assert isinstance(item, Frame) and "cret" not in item.source and "me:***@" in item.source
