"""Files from the network.

A download goes to `<target>.part` and is renamed when it is whole, so an interrupted one is resumed where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from tessera.utils import http_client
from tessera.utils.errors import UserError
from tessera.utils.files import is_at
from tessera.utils.http_client import (
    TransientError,
    check_address,
    open_address,
    read_blocks,
    shown_address,
    stated_length,
)
from tessera.utils.text import shown

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

MAX_DOWNLOAD_BYTES = 200 << 30
_LONGEST_VALIDATOR = 256


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, made for it and removed with it; waits for another that holds it.

    The lock goes with the process: a crash leaves a file that nobody holds. Holders must look again at what they
    protect: another process may have finished the work meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_at(path, file):  # its last holder has removed it: whoever comes now locks another file
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def fetch(
    url: str, target: Path, *, max_bytes: int = MAX_DOWNLOAD_BYTES, accept: Callable[[Path], None] | None = None
) -> Path:
    """Download `url` to `target`, with a bar on stderr; a target that exists is taken as it is.

    Args:
        url: http or https, redirects included.
        target: the file; its folder is made. An interrupted download stays in `<target>.part` and is resumed by the
            next call if the server can and the file there is still the same (ETag or Last-Modified).
        max_bytes: refuse anything larger.
        accept: looks at the whole file before it gets its name, and raises where it is not what was expected: then
            nothing of it is kept.

    Returns:
        `target`.

    Raises:
        UserError: the address is not http(s), the server refuses, the network fails, the file is too large or is not
            accepted, or the disk is full or read-only.
    """
    if target.exists():
        return target
    check_address(url, "Cannot download")
    part = target.with_name(target.name + ".part")
    download = _Download(url, target, max_bytes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if target.exists():  # another process fetched it while this one waited
                part.unlink(missing_ok=True)
                return target
            download.complete(file)
            file.flush()
            os.fsync(file.fileno())
            if accept is not None:
                try:
                    accept(part)
                except UserError:
                    file.truncate(0)  # else the next call would take it for whole; another process may wait for it
                    raise
            part.replace(target)
        download.state_file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write {shown(target)}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


@dataclass(frozen=True)
class _Download:
    """One address on its way to a file; the attributes are the arguments of `fetch`."""

    url: str
    target: Path
    max_bytes: int

    @property
    def state_file(self) -> Path:
        """Says which file on the server a part belongs to."""
        return self.target.with_name(self.target.name + ".part.json")

    def complete(self, file: IO[bytes]) -> None:
        """Repeat transfers into `file` until it is whole."""
        furthest, failures = file.seek(0, os.SEEK_END), 0
        while True:
            try:
                return self._transfer(file)
            except TransientError as error:
                # Only bytes never reached before count: a server that always starts over must not keep us for ever.
                size = file.seek(0, os.SEEK_END)
                failures = 1 if size > furthest else failures + 1
                furthest = max(furthest, size)
                if failures >= http_client.LIMITS.attempts:
                    kept = " (what has arrived is kept)" if _load_state(self.state_file, self.url) else ""
                    raise UserError(
                        f"Cannot download {shown_address(self.url)}: {error}. Check the network and run the command "
                        f"again{kept}, or download the file by other means to {shown(self.target)}."
                    ) from error
                http_client.LIMITS.wait(failures)

    def _transfer(self, file: IO[bytes]) -> None:
        """One request: the whole file, or what `file` lacks of it."""
        offset = file.seek(0, os.SEEK_END)
        known = _load_state(self.state_file, self.url) if offset else None
        if known is not None and offset == known["total"]:  # whole already: the process ended just before the rename
            return
        total: int | None = None
        headers: dict[str, str] = {}
        if known is not None and offset < known["total"]:
            total, headers = known["total"], {"Range": f"bytes={offset}-", "If-Range": known["validator"]}
        with open_address(self.url, headers) as response:
            if total is not None and response.status == HTTPStatus.PARTIAL_CONTENT:
                part, _, whole = response.headers.get("Content-Range", "").partition("/")
                if not part.startswith(f"bytes {offset}-") or whole != str(total):
                    file.truncate(0)
                    raise TransientError("the file changed on the server during the download")
            elif response.status == HTTPStatus.OK:
                offset = 0
                file.truncate(0)
                total = self._save_state(response)
            else:
                file.truncate(0)
                raise TransientError(f"the server answered {response.status}, expected 200 or 206")
            self._receive(response, file, offset, total)

    def _save_state(self, response: BaseHTTPResponse) -> int | None:
        """Write down which file the server is sending; return its length, where it says so."""
        total, headers = stated_length(response), response.headers
        etag = headers.get("ETag", "")
        # A weak ETag says "much the same", which is not enough to join two halves.
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        if len(validator) > _LONGEST_VALIDATOR or not (validator.isascii() and validator.isprintable()):
            validator = ""  # it could not be sent back
        self.state_file.write_text(json.dumps({"url": self.url, "validator": validator, "total": total}))
        return total

    def _receive(self, response: BaseHTTPResponse, file: IO[bytes], offset: int, total: int | None) -> None:
        """Append the body to `file`, which has `offset` bytes."""
        title = self.target.name
        with tqdm(total=total, initial=offset, unit="B", unit_scale=True, unit_divisor=1024, desc=title) as bar:
            try:
                for block in read_blocks(response, self.url, total, self.max_bytes, offset):
                    file.write(block)
                    bar.update(len(block))
            except UserError:  # it is too large
                file.truncate(0)
                raise


def _load_state(state_file: Path, url: str) -> dict[str, Any] | None:
    """What is known of the file that a part belongs to; None where that is another one, or has no ETag and no date."""
    try:
        known = json.loads(state_file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    usable = isinstance(known, dict) and known.get("url") == url and type(known.get("total")) is int
    return known if usable and known.get("validator") and isinstance(known["validator"], str) else None
