"""Resumable downloads: a file arrives as `<target>.part` and is renamed when it is complete."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from tessera.utils import http_client
from tessera.utils.errors import UserError
from tessera.utils.files import is_same_file, no_link, open_plain, write_whole
from tessera.utils.http_client import TransientError, redacted_address
from tessera.utils.text import shown

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

MAX_DOWNLOAD_BYTES = 200 << 30
_LONGEST_VALIDATOR = 256


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created for it and removed afterwards.

    A crash of the process releases the lock. Holders must re-check the protected state, as another process may have
    finished the work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab", opener=no_link) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_same_file(path, file):  # the last holder has removed it
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def fetch(
    url: str, target: Path, *, max_bytes: int = MAX_DOWNLOAD_BYTES, accept: Callable[[Path], None] | None = None
) -> Path:
    """Download `url` to `target` with a progress bar on stderr; an existing target is returned unchanged.

    Args:
        url: http or https, redirects included.
        target: the file; its folder is created. The next call resumes `<target>.part` if the server supports ranges and
            the file is unchanged (ETag or Last-Modified).
        max_bytes: size limit.
        accept: validates the complete file before the rename; if it raises, the download is discarded.

    Raises:
        UserError: the address is not http(s), the server refuses, the network fails, the file is too large or not
            accepted, or the disk is full or read-only.
    """
    if target.exists():
        return target
    http_client.check_address(url, "Cannot download")
    part = target.with_name(target.name + ".part")
    download = _Download(url, target, max_bytes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "a+b", opener=no_link) as file:
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
                    file.truncate(0)  # keep the file, as another process may wait for its lock
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
    """A download in progress; the attributes are arguments of `fetch`."""

    url: str
    target: Path
    max_bytes: int

    @property
    def state_file(self) -> Path:
        """Description of the server's file that a part belongs to."""
        return self.target.with_name(self.target.name + ".part.json")

    def complete(self, file: IO[bytes]) -> None:
        """Repeat transfers into `file` until it is complete."""
        furthest, failures = file.seek(0, os.SEEK_END), 0
        while True:
            begun = time.monotonic()
            try:
                return self._transfer(file)
            except TransientError as error:
                # Only new bytes at the least speed count as progress: a server may start over, or send a few, for ever.
                size = file.seek(0, os.SEEK_END)
                needed = http_client.LIMITS.least_speed * (time.monotonic() - begun)
                failures = 1 if size > furthest + needed else failures + 1
                furthest = max(furthest, size)
                if failures >= http_client.LIMITS.attempts:
                    resumed = " to resume" if _load_state(self.state_file, self.url) else ""
                    raise UserError(
                        f"Cannot download {redacted_address(self.url)}: {error}. Check the network and run the command "
                        f"again{resumed}, or download the file by other means to {shown(self.target)}."
                    ) from error
                http_client.LIMITS.wait(failures)

    def _transfer(self, file: IO[bytes]) -> None:
        """Request the file, or the rest that `file` lacks."""
        offset = file.seek(0, os.SEEK_END)
        state = _load_state(self.state_file, self.url) if offset else None
        if state is not None and offset == state["total"]:  # the process was killed just before the rename
            return
        total: int | None = None
        headers: dict[str, str] = {}
        if state is not None and offset < state["total"]:
            total, headers = state["total"], {"Range": f"bytes={offset}-", "If-Range": state["validator"]}
        with http_client.open_address(self.url, headers) as response:
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
        """Save which file the server sends; return its length, if stated."""
        total, headers = http_client.stated_length(response), response.headers
        etag = headers.get("ETag", "")
        # A weak ETag does not promise equal bytes.
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        if len(validator) > _LONGEST_VALIDATOR or not (validator.isascii() and validator.isprintable()):
            validator = ""  # it could not be sent back
        state = {"url": self.url, "validator": validator, "total": total}
        write_whole(self.state_file, json.dumps(state).encode())
        return total

    def _receive(self, response: BaseHTTPResponse, file: IO[bytes], offset: int, total: int | None) -> None:
        """Append the body to `file`, which has `offset` bytes."""
        title = self.target.name
        scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        with tqdm(total=total, initial=offset, desc=title, disable=None, **scale) as bar:
            try:
                for block in http_client.read_blocks(response, self.url, total, self.max_bytes, offset):
                    file.write(block)
                    bar.update(len(block))
            except UserError:  # it is too large
                file.truncate(0)
                raise


def _load_state(state_file: Path, url: str) -> dict[str, Any] | None:
    """Return the state of a part; None if it is of another file, or has neither ETag nor date."""
    try:
        with open_plain(state_file, 1 << 16) as file:
            state = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    usable = isinstance(state, dict) and state.get("url") == url and type(state.get("total")) is int
    return state if usable and state.get("validator") and isinstance(state["validator"], str) else None
