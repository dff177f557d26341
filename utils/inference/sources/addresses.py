"""What an address answers: a picture, a video file, or a stream, which is left to FFmpeg.

Nothing is asked for but the addresses that were given, and where they redirect to.
"""

from __future__ import annotations

import base64
import http.client
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from tessera.data.source.probe import KIND_BYTES, holds_picture, holds_video
from tessera.utils.errors import UserError
from tessera.utils.files import suffix_of
from tessera.utils.inference.sources.origins import VIDEO_SUFFIXES, without_password
from tessera.utils.network import Pace, TransientError, broken, check_address, open_address
from tessera.utils.text import one_line
from tessera.utils.types import IMAGE_SUFFIXES

MOST_PICTURE_BYTES, MOST_VIDEO_BYTES = 1 << 30, 1 << 35
_BLOCK = 1 << 20
_STREAM_SUFFIXES = frozenset({".m3u8", ".mpd", ".sdp"})
_STREAM_TYPES = frozenset({"application/vnd.apple.mpegurl", "application/x-mpegurl", "application/dash+xml"})


@dataclass(frozen=True)
class AddressPatience:
    """When the answer of a server is given up.

    Attributes:
        attempts: tries.
        pause_s: before the second one; it doubles with each further one.
        timeout_s: longest silence.
        least_speed, slack_s: as in Pace.
    """

    attempts: int = 3
    pause_s: float = 1.0
    timeout_s: float = 30.0
    least_speed: float = 16384.0
    slack_s: float = 60.0


PATIENCE = AddressPatience()


def ask(address: str, patience: AddressPatience = PATIENCE) -> bytes | tempfile._TemporaryFileWrapper[bytes] | None:
    """The picture, or the video as a temporary file that is gone when it is closed; None where it is a stream.

    Args:
        address: http or https.
        patience: when to give up.

    Raises:
        UserError: it is unavailable, too large, or is something else.
    """
    check_address(address, "Cannot read")
    suffix = suffix_of(urlsplit(address).path)
    if suffix in _STREAM_SUFFIXES:
        return None
    for attempt in range(1, patience.attempts + 1):
        try:
            return _answer(address, suffix, Pace(patience.least_speed, patience.slack_s, patience.timeout_s))
        except TransientError as error:
            if suffix not in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
                return None  # perhaps a stream that is not there yet: those are waited for
            if attempt == patience.attempts:
                raise UserError(
                    f"{one_line(without_password(address), 200)}: {error}. Check the address and the network."
                ) from error
            time.sleep(patience.pause_s * 2 ** (attempt - 1))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _answer(address: str, suffix: str, pace: Pace) -> bytes | tempfile._TemporaryFileWrapper[bytes] | None:
    pace.start(MOST_VIDEO_BYTES)
    with open_address(_request(address), pace) as response:
        what, length = response.headers.get_content_type(), response.headers.get("Content-Length", "")
        if what.startswith("multipart/") or what in _STREAM_TYPES:
            return None
        total = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        blocks, head = _blocks(response, address, total), b""
        for block in blocks:
            head += block
            if len(head) >= KIND_BYTES:
                break
        if holds_picture(head) or what.startswith("image/") or suffix in IMAGE_SUFFIXES:
            _refuse(max(total or 0, len(head)), MOST_PICTURE_BYTES, address)
            return _picture(head, blocks, address)
        if total is None and (what.startswith("video/") or holds_video(head)):
            return None  # endless, or as good as that
        if what.startswith("video/") or suffix in VIDEO_SUFFIXES or holds_video(head):
            _refuse(max(total or 0, len(head)), MOST_VIDEO_BYTES, address)
            return _video(head, blocks, address, suffix)
    raise UserError(
        f"{one_line(without_password(address), 200)}: it answers {one_line(what, 50)}, expected a picture, a video or "
        "a stream."
    )


def _request(address: str) -> urllib.request.Request:
    """A request; an account in the address is not sent where it redirects to."""
    parts = urlsplit(address)
    account, _, host = parts.netloc.rpartition("@")
    headers = {"User-Agent": "tessera", "Accept-Encoding": "identity"}
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl(), headers=headers)
    if account:
        coded = base64.b64encode(unquote_to_bytes(account)).decode("ascii")
        request.add_unredirected_header("Authorization", f"Basic {coded}")
    return request


def _picture(head: bytes, blocks: Iterator[bytes], address: str) -> bytes:
    found = [head]
    size = len(head)
    for block in blocks:
        size += len(block)
        _refuse(size, MOST_PICTURE_BYTES, address)
        found.append(block)
    return b"".join(found)


def _video(head: bytes, blocks: Iterator[bytes], address: str, suffix: str) -> tempfile._TemporaryFileWrapper[bytes]:
    file = tempfile.NamedTemporaryFile(prefix="tessera-", suffix=suffix)  # noqa: SIM115 - the caller closes it
    try:
        size = file.write(head)
        for block in blocks:
            size += len(block)
            _refuse(size, MOST_VIDEO_BYTES, address)
            file.write(block)
        file.flush()
    except OSError as error:
        file.close()
        folder = Path(file.name).parent
        raise UserError(
            f"{one_line(without_password(address), 200)}: the video cannot be kept in {folder} ({error.strerror}). "
            "Free some space, or set TMPDIR to another folder."
        ) from error
    except BaseException:
        file.close()
        raise
    return file


def _blocks(response: Any, address: str, total: int | None) -> Iterator[bytes]:
    """What comes, block by block.

    Raises:
        TransientError: the connection broke.
    """
    received = 0
    while True:
        try:
            block = response.read1(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise broken(error) from error
        if not block:
            break
        received += len(block)
        yield block
    if total is not None and received < total:
        raise TransientError(f"the connection ended after {received:,} of {total:,} bytes")


def _refuse(size: int, most: int, address: str) -> None:
    if size > most:
        raise UserError(f"{one_line(without_password(address), 200)}: it has more than the limit of {most:,} bytes.")
