"""Standard input: the bytes of a picture, or a list with a path or an address a line, read as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from tessera.data.source.probe import KIND_BYTES, holds_picture, holds_video
from tessera.utils.errors import UserError
from tessera.utils.files import LONGEST_PATH

MOST_BYTES = 1 << 30  # of a picture
_LONGEST_LINE = 4 * LONGEST_PATH


def read_stdin(stdin: IO[bytes]) -> Iterator[bytes | str]:
    """The one picture that comes, else lines; blank ones, and those that start with #, are passed over.

    Args:
        stdin: binary, of any kind: nothing is sought.

    Yields:
        the bytes of a picture, and nothing else; or lines, stripped.

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
        rest = stdin.read(MOST_BYTES + 1 - len(head))
        if len(head) + len(rest) > MOST_BYTES:
            raise UserError(f"-: more than {MOST_BYTES:,} bytes came over standard input, expected a picture.")
        yield head + rest
        return
    if holds_video(head):
        raise UserError("-: a video came over standard input, expected a picture or a list of files. Give its path.")
    yield from _lines(head, stdin)


def _lines(head: bytes, stdin: IO[bytes]) -> Iterator[str]:
    first, newline, begun = head.rpartition(b"\n")
    for line in first.split(b"\n") if newline else ():
        yield from _line(line)
    row = begun + stdin.readline(_LONGEST_LINE)
    while row:
        yield from _line(row)
        row = stdin.readline(_LONGEST_LINE)


def _line(row: bytes) -> Iterator[str]:
    if b"\0" in row or len(row) >= _LONGEST_LINE:
        raise UserError("-: what came over standard input is neither a picture nor a list of files, one a line.")
    line = row.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff").strip()
    if line and not line.startswith("#"):
        yield line
