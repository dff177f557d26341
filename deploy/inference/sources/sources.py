"""Iterator over the frames and events of all sources: files in order, then streams concurrently."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from tessera.data.source.image_header import KIND_BYTES, extra_pages_message, is_truncated
from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import TransientError, redacted
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.source_arguments import (
    IMAGE_SOURCE_SUFFIXES,
    VIDEO_SUFFIXES,
    Origin,
    is_image,
    is_video,
    parse_line,
    parse_sources,
)
from tessera.deploy.inference.sources.stream import read_streams
from tessera.deploy.inference.sources.video import read_video
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import LONGEST_PATH, suffix_of
from tessera.utils.text import one_line

log = logging.getLogger(__name__)

ReadImage = Callable[[Path | bytes], Pixels]
Item = Frame | SourceEvent
VideoFile: TypeAlias = "tempfile._TemporaryFileWrapper[bytes]"

_MOST_BYTES = 1 << 30  # of an image over standard input
_LONGEST_LINE = 4 * LONGEST_PATH
MOST_IMAGE_BYTES, MOST_VIDEO_BYTES = 1 << 30, 1 << 35
_STREAM_SUFFIXES = frozenset({".m3u8", ".mpd", ".sdp"})
_STREAM_TYPES = frozenset({"application/vnd.apple.mpegurl", "application/x-mpegurl", "application/dash+xml"})
BROKEN_OFF = "damaged: the end of the file is missing; the part that decodes was used."


def open_sources(
    specs: str | int | Path | Iterable[str | int | Path],
    *,
    read: ReadImage,
    vid_stride: int = 1,
    every_frame: bool = False,
) -> Sources:
    """Parse `--source`, as `parse_sources`; nothing is read before the first iteration.

    Args:
        specs: one or several.
        read: reads an image from a path or encoded bytes to uint8 (H, W, 3) RGB; a UserError of it becomes an event.
        vid_stride: use each `vid_stride`-th frame of videos and streams.
        every_frame: use all frames of a stream in order instead of the newest one.
    """
    if vid_stride < 1:
        raise ConfigError(f"--vid-stride: found {vid_stride}, expected a whole number of at least 1.")
    if isinstance(specs, (str, int, Path)):
        specs = [specs]
    origins = parse_sources(specs)
    if not origins:
        raise UserError("--source: found none, expected a path, a URL, a camera number or -.")
    return Sources(origins, read, vid_stride, every_frame)


@dataclass(eq=False)
class Sources(AbstractContextManager["Sources"]):
    """Frames and events of sources; iterate once inside `with`. Attributes as in `open_sources`.

    Images and videos come first, in order; then streams and cameras, concurrently.
    """

    origins: Sequence[Origin]
    read: ReadImage
    vid_stride: int
    every_frame: bool
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def images(self) -> int | None:
        """Number of images, readable or not; None where there are other sources."""
        of_files = all(origin.form in ("image", "unreadable") for origin in self.origins)
        return len(self.origins) if of_files else None

    def __iter__(self) -> Iterator[Item]:
        items = self._all()
        self._stack.callback(items.close)
        return items

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _all(self) -> Generator[Item, None, None]:
        streams: list[Origin] = []
        for origin in self.origins:
            if origin.form in ("stream", "camera"):
                streams.append(origin)
            else:
                yield from self._items(origin, streams)
        by_source = {origin.source: origin for origin in streams}  # duplicates are read once
        yield from read_streams([*by_source.values()], every_frame=self.every_frame, vid_stride=self.vid_stride)

    def _items(self, origin: Origin, streams: list[Origin]) -> Iterator[Item]:
        """Yield the items of a source; streams are appended to `streams` instead."""
        if origin.form == "image":
            yield from self._image(origin, Path(origin.where))
        elif origin.form == "stdin":
            yield from self._from_stdin(origin, streams)
        elif origin.form == "address":
            yield from self._from_address(origin, streams)
        elif origin.form in ("stream", "camera"):  # given over standard input
            streams.append(origin)
        elif origin.form == "video":
            yield from read_video(origin, self.vid_stride)
        else:
            yield _unreadable(origin, origin.why)

    def _image(self, origin: Origin, encoded: Path | bytes) -> Iterator[Item]:
        try:
            frame = Frame(self.read(encoded), origin.source, name=origin.place)
        except ConfigError:  # affects the whole run
            raise
        except UserError as error:
            yield _unreadable(origin, str(error))
            return
        yield frame
        del frame  # frees memory while the next one is decoded
        if is_truncated(encoded):
            message = f"{one_line(origin.source, LONGEST_PATH)}: {BROKEN_OFF}"
            yield SourceEvent(origin.source, "damaged", message, name=origin.place)
        if remark := extra_pages_message(encoded):
            log.warning(f"{one_line(origin.source, LONGEST_PATH)}: {remark}.")

    def _from_address(self, origin: Origin, streams: list[Origin]) -> Iterator[Item]:
        try:
            found = read_address(origin.where)
        except UserError as error:
            yield _unreadable(origin, str(error))
            return
        if found is None:
            streams.append(replace(origin, form="stream"))
        elif isinstance(found, bytes):
            yield from self._image(origin, found)
        else:
            with found:
                yield from read_video(origin, self.vid_stride, found.name)

    def _from_stdin(self, origin: Origin, streams: list[Origin]) -> Iterator[Item]:
        if sys.stdin is None:
            yield _unreadable(origin, "standard input is closed, expected an image or a list of files.")
            return
        try:
            for found in read_stdin(sys.stdin.buffer):
                if isinstance(found, bytes):
                    yield from self._image(origin, found)
                else:
                    yield from self._items(parse_line(found), streams)
        except ConfigError:
            raise
        except (UserError, OSError) as error:
            yield _unreadable(origin, str(error))


def _unreadable(origin: Origin, why: str) -> SourceEvent:
    shown = one_line(origin.source, LONGEST_PATH)
    message = " ".join((why if shown in why or origin.form == "unreadable" else f"{shown}: {why}").splitlines())
    return SourceEvent(origin.source, "unreadable", message, name=origin.place)


def read_stdin(stdin: IO[bytes]) -> Iterator[bytes | str]:
    """Yield the one image, or else the lines as they arrive, stripped, without blank ones and comments (#).

    Raises:
        UserError: the input is empty, or neither an image nor text.
    """
    read = getattr(stdin, "read1", stdin.read)
    head = b""
    while len(head) < KIND_BYTES and (more := read(KIND_BYTES - len(head))):
        head += more
        if b"\n" in head and not is_image(head):  # a list may be written line by line
            break
    if not head:
        raise UserError("-: standard input is empty, expected an image or a list of files.")
    if is_image(head):
        image = head + stdin.read(_MOST_BYTES + 1 - len(head))
        if len(image) > _MOST_BYTES:
            raise UserError(f"-: found more than {_MOST_BYTES:,} bytes on standard input, expected an image.")
        yield image
        return
    if is_video(head):
        raise UserError("-: found a video on standard input, expected an image or a list of files. Give its path.")
    *lines, begun = head.split(b"\n")
    rest = iter(lambda: stdin.readline(_LONGEST_LINE), b"")
    for row in chain(lines, (begun + next(rest, b"") for _ in range(1)), rest):
        if b"\0" in row or len(row) >= _LONGEST_LINE:
            raise UserError("-: standard input is neither an image nor a list of files, one per line.")
        line = row.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff").strip()
        if line and not line.startswith("#"):
            yield line


if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


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
