"""Sources, opened one after the other, streams all at once, as one iterator of frames and events."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO

from tessera.data.source.image_header import KIND_BYTES, breaks_off, holds_picture, holds_video
from tessera.data.source.tiff import unread_pages
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import LONGEST_PATH
from tessera.utils.inference.sources.frames import Frame, SourceEvent
from tessera.utils.inference.sources.source_arguments import Origin, find_origins, of_line
from tessera.utils.inference.sources.stream import read_streams
from tessera.utils.inference.sources.urls import read_address
from tessera.utils.inference.sources.video import read_video
from tessera.utils.text import one_line

log = logging.getLogger(__name__)

ReadPicture = Callable[[Path | bytes], Pixels]
Item = Frame | SourceEvent

_MOST_BYTES = 1 << 30  # of a picture over standard input
_LONGEST_LINE = 4 * LONGEST_PATH
BROKEN_OFF = "damaged: the end of the file is missing; what decodes of it was used."


def open_sources(
    specs: str | int | Path | Iterable[str | int | Path],
    *,
    read: ReadPicture,
    vid_stride: int = 1,
    every_frame: bool = False,
) -> Sources:
    """Find what `--source` names; nothing is read before the first iteration.

    Args:
        specs: one or several, as of `find_origins`.
        read: the door for pictures: a path or encoded bytes → uint8 (H, W, 3) RGB. A UserError that it raises becomes
            an event.
        vid_stride: of videos and streams, each `vid_stride`-th frame.
        every_frame: of streams, all frames in order instead of the newest one.

    Raises:
        ConfigError: a stride below 1.
        UserError: nothing is there, a folder is empty, a file is neither picture nor video nor list.
    """
    if vid_stride < 1:
        raise ConfigError(f"--vid-stride: found {vid_stride}, expected a whole number of at least 1.")
    if isinstance(specs, (str, int, Path)):
        specs = [specs]
    origins = find_origins(specs)
    if not origins:
        raise UserError("--source: found none, expected a path, an address, a camera's number or -.")
    return Sources(origins, read, vid_stride, every_frame)


@dataclass(eq=False)
class Sources:
    """Frames and events of sources: iterate over it, once, inside `with`; attributes as in `open_sources`.

    Pictures and videos come first, in the order in which they were named; streams and cameras after them, all at once.
    """

    origins: Sequence[Origin]
    read: ReadPicture
    vid_stride: int
    every_frame: bool
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def pictures(self) -> int | None:
        """How many pictures there are, readable or not; None where other sources are among them."""
        of_files = all(origin.form in ("picture", "unreadable") for origin in self.origins)
        return len(self.origins) if of_files else None

    def __iter__(self) -> Iterator[Item]:
        items = self._all()
        self._stack.callback(items.close)
        return items

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _all(self) -> Generator[Item, None, None]:
        streams: list[Origin] = []
        for origin in self.origins:
            if origin.form in ("stream", "camera"):
                streams.append(origin)
            else:
                yield from self._items(origin, streams)
        by_source = {origin.source: origin for origin in streams}  # one that is named twice is read once
        yield from read_streams([*by_source.values()], every_frame=self.every_frame, vid_stride=self.vid_stride)

    def _items(self, origin: Origin, streams: list[Origin]) -> Iterator[Item]:
        """What is no stream; an address that turns out to be one goes to `streams`."""
        if origin.form == "picture":
            yield from self._picture(origin, Path(origin.where))
        elif origin.form == "stdin":
            yield from self._from_stdin(origin, streams)
        elif origin.form == "address":
            yield from self._from_address(origin, streams)
        elif origin.form in ("stream", "camera"):  # named over standard input
            streams.append(origin)
        elif origin.form == "video":
            yield from read_video(origin, self.vid_stride)
        else:
            yield _unreadable(origin, origin.why)

    def _picture(self, origin: Origin, encoded: Path | bytes) -> Iterator[Item]:
        try:
            frame = Frame(self.read(encoded), origin.source, name=origin.place)
        except ConfigError:  # of the whole run
            raise
        except UserError as error:
            yield _unreadable(origin, str(error))
            return
        yield frame
        del frame  # nothing is kept while the next one is decoded
        if breaks_off(encoded):
            said = f"{one_line(origin.source, LONGEST_PATH)}: {BROKEN_OFF}"
            yield SourceEvent(origin.source, "damaged", said, name=origin.place)
        if remark := unread_pages(encoded):
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
            yield from self._picture(origin, found)
        else:
            with found:
                yield from read_video(origin, self.vid_stride, found.name)

    def _from_stdin(self, origin: Origin, streams: list[Origin]) -> Iterator[Item]:
        if sys.stdin is None:
            yield _unreadable(origin, "standard input is closed, expected a picture or a list of files.")
            return
        try:
            for found in read_stdin(sys.stdin.buffer):
                if isinstance(found, bytes):
                    yield from self._picture(origin, found)
                else:
                    yield from self._items(of_line(found), streams)
        except ConfigError:
            raise
        except (UserError, OSError) as error:
            yield _unreadable(origin, str(error))


def _unreadable(origin: Origin, why: str) -> SourceEvent:
    shown = one_line(origin.source, LONGEST_PATH)
    message = " ".join((why if shown in why or origin.form == "unreadable" else f"{shown}: {why}").splitlines())
    return SourceEvent(origin.source, "unreadable", message, name=origin.place)


def read_stdin(stdin: IO[bytes]) -> Iterator[bytes | str]:
    """The one picture that comes, else lines as they come, stripped; not blank ones and those that start with #.

    Raises:
        UserError: what comes is neither, or nothing comes.
    """
    read = getattr(stdin, "read1", stdin.read)
    head = b""
    while len(head) < KIND_BYTES and (more := read(KIND_BYTES - len(head))):
        head += more
        if b"\n" in head and not holds_picture(head):  # a list that somebody writes line by line
            break
    if not head:
        raise UserError("-: nothing came over standard input, expected a picture or a list of files.")
    if holds_picture(head):
        picture = head + stdin.read(_MOST_BYTES + 1 - len(head))
        if len(picture) > _MOST_BYTES:
            raise UserError(f"-: more than {_MOST_BYTES:,} bytes came over standard input, expected a picture.")
        yield picture
        return
    if holds_video(head):
        raise UserError("-: a video came over standard input, expected a picture or a list of files. Give its path.")
    *lines, begun = head.split(b"\n")
    rest = iter(lambda: stdin.readline(_LONGEST_LINE), b"")
    for row in chain(lines, (begun + next(rest, b"") for _ in range(1)), rest):
        if b"\0" in row or len(row) >= _LONGEST_LINE:
            raise UserError("-: what came over standard input is neither a picture nor a list of files, one a line.")
        line = row.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff").strip()
        if line and not line.startswith("#"):
            yield line
