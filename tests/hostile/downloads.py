"""Hostile web servers, and resumed downloads after them."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import random
from collections.abc import Callable
from pathlib import Path

from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import NetworkLimits, fetch
from tests.hostile.damages import named
from tests.hostile.expect import Message, message_or_result
from tests.raw_server import raw_server

CASES, FAST_CASES, TIME_LIMIT_S, MEMORY = 1000, 25, 60, 2**29

BODY = random.Random(0).randbytes(30_000)
LIMITS = NetworkLimits(attempts=2, pause_s=0.01, timeout_s=0.5)
LONGER_LIMITS = dataclasses.replace(LIMITS, timeout_s=10.0)  # with a sound server, however busy the machine is
Pieces = list[bytes | float]


def trial(rng: random.Random, folder: Path) -> str:
    kind = rng.choice([*_ANSWERS, "address"])
    target = folder / "data.zip"
    get = functools.partial(fetch, max_bytes=100_000)
    download.LIMITS = LIMITS
    if kind == "address":
        assert isinstance(message_or_result(lambda: get(_address(rng), target)), Message)
        return kind
    pieces = _ANSWERS[kind](rng)
    with raw_server(pieces) as server:
        used = message_or_result(lambda: get(server.url, target))
        if isinstance(used, Message):
            assert not target.exists(), f"{kind}: a part was left as the file"
            pieces[:] = [_header(len(BODY)) + BODY]
            download.LIMITS = LONGER_LIMITS
            again = message_or_result(lambda: get(server.url, target))
            assert again == target, f"{kind}: not downloaded from a sound server: {again}"
            assert target.read_bytes() == BODY, f"{kind}: joined with what is not of this file"
        elif kind in _WHOLE:
            assert target.read_bytes() == BODY, f"{kind}: {target.stat().st_size} of {len(BODY)} bytes"
    assert [path.name for path in folder.iterdir()] == ["data.zip"], "something is left over"
    return kind


def _header(length: int | str, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nETag: \"one\"\r\n" + more + f"Content-Length: {length}\r\n\r\n".encode()  # fmt: skip


def _header_flipped(rng: random.Random) -> Pieces:
    """Damage in the header; what follows is whole."""
    header = bytearray(_header(len(BODY)))
    for _ in range(rng.randint(1, 4)):
        header[rng.randrange(len(header))] = rng.choice(b"\0\r\n: \x1b\xff9az;=-")
    return [bytes(header) + BODY]


def _trickle(rng: random.Random) -> Pieces:
    start = rng.choice(
        [b"", b"HTTP/1.1 200 OK\r\nA: ", _header(len(BODY)), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"]
    )
    return [start, *[b"x", 0.02] * 200]


def _encoded(rng: random.Random) -> Pieces:
    encoding, body = (
        rng.choice((b"gzip", b"GZIP, br", b"x-gzip", b"\x1b[2J", b"deflate")),
        gzip.compress(bytes(1 << 24)),
    )
    return [_header(len(body), b"Content-Encoding: " + encoding + b"\r\n") + body]


def _silence(rng: random.Random) -> Pieces:
    whole = _header(len(BODY)) + BODY
    return [whole[: rng.randrange(len(whole))], 5.0]


def _endless(rng: random.Random) -> Pieces:
    start = rng.choice(
        [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"", b"HTTP/1.1 302 Found\r\nLocation: SELF\r\n\r\n"]
    )
    return [start, *[rng.choice([b"x", b"a: b\r\n"]) * 20_000] * 20]


def _chunks(rng: random.Random) -> Pieces:
    sizes = rng.choice([b"7530", b"zz", b"-1", b"f" * 20, b"7530;" + b"x" * 70_000, b"1"])
    end = rng.choice([b"\r\n0\r\n\r\n", b"", b"\r\n"])
    return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%b\r\n%b%b" % (sizes, BODY, end)]


def _redirect(rng: random.Random) -> Pieces:
    places = [
        b"SELF", b"/", b"http://[", b"file:///etc/passwd", b"ftp://a/b", b"http://" + b"a" * 70, b"", b"//",
        b"http://a:b", b"http://127.0.0.1:1/", b"SELF?" + b"x" * 9000, b"http://\xff/", b"javascript:1", b"\x1b[2J",
        b"http:///a",
    ]  # fmt: skip
    return [b"HTTP/1.1 %d Moved\r\nLocation: %s\r\n\r\n" % (rng.choice([301, 302, 303, 307, 308]), rng.choice(places))]


def _status(rng: random.Random) -> Pieces:
    code = rng.choice([*b"100 204 206 304 401 404 407 416 500 503 000 999 -1".split(), b"2" * 5000])
    reason = rng.choice([b"", b"\x1b[31m", b"x" * 60_000])
    return [b"HTTP/1.1 %b %b\r\nContent-Range: bytes 0-1/\x80\r\n\r\nab" % (code, reason)]


def _address(rng: random.Random) -> str:
    odd = [
        "http://[", "http://a:b/", "http://a:99999/", "file:///etc/passwd", "http://", "", "\x1b[2J", "http://a b/",
        "http://\ud800/", f"http://{'a' * 70}/", "x" * 9999, "http://a/\u202e", "//a/b", "http://127.0.0.1:1/a",
    ]  # fmt: skip
    return rng.choice(odd)


_LENGTHS = ("-1", "9" * 5000, "1e3", "0x10", "", "30001", "99999999999", "\u0663")
_ANSWERS: dict[str, Callable[[random.Random], Pieces]] = {
    **named(_header_flipped, _trickle, _encoded, _silence, _endless, _chunks, _redirect, _status),
    "noise": lambda rng: [rng.randbytes(rng.randint(0, 3000))],
    "length": lambda rng: [_header(rng.choice(_LENGTHS)) + BODY],
    "cut": lambda rng: [_header(len(BODY)) + BODY[: rng.randrange(len(BODY))]],
    "made well": lambda rng: [rng.choice([_header(len(BODY)) + BODY, b"HTTP/1.1 200 OK\r\n\r\n" + BODY])],
}
_WHOLE = frozenset({"cut", "made well"})
