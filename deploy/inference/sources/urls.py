"""Download of http(s) sources: an image, a video file, or a stream, which is left to FFmpeg.

Only the given URLs and their redirects are requested.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from tessera.data.source.image_header import KIND_BYTES
from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import TransientError, redacted
from tessera.deploy.inference.sources.source_arguments import IMAGE_SOURCE_SUFFIXES, VIDEO_SUFFIXES, is_image, is_video
from tessera.utils.errors import UserError
from tessera.utils.files import suffix_of
from tessera.utils.text import one_line

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

MOST_IMAGE_BYTES, MOST_VIDEO_BYTES = 1 << 30, 1 << 35
_STREAM_SUFFIXES = frozenset({".m3u8", ".mpd", ".sdp"})
_STREAM_TYPES = frozenset({"application/vnd.apple.mpegurl", "application/x-mpegurl", "application/dash+xml"})

VideoFile: TypeAlias = "tempfile._TemporaryFileWrapper[bytes]"


def read_address(address: str) -> bytes | VideoFile | None:
    """Return an image, a video as a temporary file that closing deletes, or None for a stream.

    Raises:
        UserError: the URL is unavailable, too large, or something else.
    """
    download.check_address(address, "Cannot read")
    suffix = suffix_of(urlsplit(address).path)
    if suffix in _STREAM_SUFFIXES:
        return None
    for attempt in itertools.count(1):
        try:
            return _request(address, suffix)
        except TransientError as error:
            if suffix not in IMAGE_SOURCE_SUFFIXES | VIDEO_SUFFIXES:
                return None  # perhaps a stream that has not started yet
            if attempt == download.LIMITS.attempts:
                raise UserError(f"{redacted(address)}: {error}. Check the URL and the network.") from error
            download.LIMITS.wait(attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _request(address: str, suffix: str) -> bytes | VideoFile | None:
    with download.open_address(address) as response:
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        total = response.length_remaining
        if media_type.startswith("multipart/") or media_type in _STREAM_TYPES:
            return None
        head = b""
        for block in download.read_blocks(response, address, total, MOST_VIDEO_BYTES):
            head += block
            if len(head) >= KIND_BYTES:
                break
        if is_image(head) or media_type.startswith("image/") or suffix in IMAGE_SOURCE_SUFFIXES:
            return b"".join([head, *download.read_blocks(response, address, total, MOST_IMAGE_BYTES, len(head))])
        if total is None and (media_type.startswith("video/") or is_video(head)):
            return None  # endless
        if media_type.startswith("video/") or suffix in VIDEO_SUFFIXES or is_video(head):
            return _video(head, response, address, suffix, total)
    raise UserError(f"{redacted(address)}: found type {one_line(media_type, 50)}, expected an image, video or stream.")


def _video(head: bytes, response: BaseHTTPResponse, address: str, suffix: str, total: int | None) -> VideoFile:
    file = tempfile.NamedTemporaryFile(prefix="tessera-", suffix=suffix)  # noqa: SIM115 - the caller closes it
    try:
        file.write(head)
        file.writelines(download.read_blocks(response, address, total, MOST_VIDEO_BYTES, len(head)))
        file.flush()
    except BaseException as error:
        file.close()
        if not isinstance(error, OSError) or isinstance(error, TransientError):
            raise
        raise UserError(
            f"{redacted(address)}: the video cannot be stored in {Path(file.name).parent} ({error.strerror}). "
            "Free space there, or set TMPDIR to another folder."
        ) from error
    return file
