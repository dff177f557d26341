"""Files from the network.

A download goes to `<target>.part` and is renamed when it is whole, so an interrupted one is resumed where it stopped.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tqdm import tqdm

from utils.errors import UserError

MAX_DOWNLOAD_BYTES = 200 << 30
_BLOCK = 1 << 20
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class _TransientError(Exception):
    """A failure that may pass: try again."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made where it is missing); waits for another process that holds it.

    The lock goes with the process, so a crash leaves none behind. Holders must look again at what they protect: another
    process may have finished the work meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Patience:
    """When a download is given up.

    Attributes:
        attempts: tries in a row that bring nothing new.
        backoff_s: pause before the second try; it doubles with each further one, up to 30 s.
        timeout_s: longest silence of the server.
    """

    attempts: int = 3
    backoff_s: float = 1.0
    timeout_s: float = 30.0


PATIENCE = Patience()


def fetch(
    url: str,
    target: Path,
    *,
    max_bytes: int = MAX_DOWNLOAD_BYTES,
    progress: bool = True,
    patience: Patience = PATIENCE,
) -> Path:
    """Download `url` to `target`; a target that exists is taken as it is.

    Args:
        url: http or https, redirects included.
        target: the file; its folder is made. An interrupted download stays in `<target>.part` and is resumed by the
            next call if the server can and the file there is still the same (ETag or Last-Modified, else its length).
        max_bytes: refuse anything larger.
        progress: show a bar on stderr.
        patience: when to give up.

    Returns:
        `target`.

    Raises:
        UserError: the address is not http(s), the server refuses, the network fails, the file is too large, or the disk
            is full or read-only.
    """
    if target.exists():
        return target
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"Cannot download '{url}': expected an address that starts with http:// or https://.")
    part = target.with_name(target.name + ".part")
    download = _Download(url, target, max_bytes, progress, patience)
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
            part.replace(target)
        download.memory.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write {target}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


@dataclass(frozen=True)
class _Download:
    """One address on its way to a file; the attributes are the arguments of `fetch`."""

    url: str
    target: Path
    max_bytes: int
    progress: bool
    patience: Patience

    @property
    def memory(self) -> Path:
        """Where it is written down which file on the server a part belongs to."""
        return self.target.with_name(self.target.name + ".part.json")

    def complete(self, file: IO[bytes]) -> None:
        """Repeat transfers into `file` until it is whole."""
        furthest, failures = file.seek(0, os.SEEK_END), 0
        while True:
            try:
                return self._transfer(file)
            except _TransientError as error:
                # Only bytes never reached before count: a server that always starts over must not keep us for ever.
                size = file.seek(0, os.SEEK_END)
                failures = 1 if size > furthest else failures + 1
                furthest = max(furthest, size)
                if failures >= self.patience.attempts:
                    raise UserError(
                        f"Cannot download {self.url}: {error}. Check the network and run the command again (what has "
                        f"arrived is kept), or download the file by other means to {self.target}."
                    ) from error
                time.sleep(min(self.patience.backoff_s * 2 ** (failures - 1), 30.0))

    def _transfer(self, file: IO[bytes]) -> None:
        """One request: the whole file, or what `file` lacks of it."""
        offset = file.seek(0, os.SEEK_END)
        known = _recall(self.memory, self.url) if offset else None
        if known is not None and offset == known["total"]:  # whole already: the process ended just before the rename
            return
        if known is None or offset > known["total"]:
            offset = 0
        headers = {"User-Agent": "tessera", "Accept-Encoding": "identity"}
        if offset and known is not None:
            headers["Range"] = f"bytes={offset}-"
            if known["validator"]:
                headers["If-Range"] = known["validator"]
        with _open(urllib.request.Request(self.url, headers=headers), self.patience.timeout_s) as response:
            total: int | None
            if response.status == 206 and offset:
                match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
                if match is None or int(match[1]) != offset or int(match[2]) != (known or {}).get("total"):
                    file.truncate(0)
                    raise _TransientError("the file changed on the server during the download")
                total = int(match[2])
            elif response.status == 200:
                offset = 0
                file.truncate(0)
                total = self._remember(response.headers)
            else:
                file.truncate(0)
                raise _TransientError(f"the server answered {response.status}, expected 200 or 206")
            received = self._receive(response, file, offset, total)
        if total is not None and received != total:
            raise _TransientError(f"the connection ended after {received:,} of {total:,} bytes")

    def _remember(self, headers: http.client.HTTPMessage) -> int | None:
        """Write down which file the server is sending; return its length, where it says so."""
        length = headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        etag = headers.get("ETag", "")
        # A weak ETag says "much the same", which is not enough to join two halves.
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")
        self.memory.write_text(json.dumps({"url": self.url, "validator": validator, "total": total}))
        return total

    def _receive(self, response: IO[bytes], file: IO[bytes], offset: int, total: int | None) -> int:
        """Append the body to `file`, which has `offset` bytes; return how many it has then."""
        if total is not None and total > self.max_bytes:
            raise UserError(
                f"Cannot download {self.url}: it has {total:,} bytes, more than the limit of {self.max_bytes:,}."
            )
        received, title, silent = offset, self.target.name, not self.progress
        with tqdm(
            total=total, initial=offset, unit="B", unit_scale=True, unit_divisor=1024, desc=title, disable=silent
        ) as bar:
            while block := _read(response):
                received += len(block)
                if received > self.max_bytes:
                    file.truncate(0)
                    raise UserError(
                        f"Cannot download {self.url}: it has more than the limit of {self.max_bytes:,} bytes."
                    )
                file.write(block)
                bar.update(len(block))
        return received


def _recall(memory: Path, url: str) -> dict[str, Any] | None:
    """What is known of the file that a part belongs to; None where it is another file or cannot be resumed."""
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return None
    usable = isinstance(known, dict) and known.get("url") == url and isinstance(known.get("total"), int)
    return known if usable and "validator" in known else None


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https only, and never from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise UserError(f"Cannot download {req.full_url}: it redirects to '{newurl}', which is not {allowed[0]}.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """An opener without the file:, ftp: and data: schemes that urllib's default one accepts."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _HttpRedirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    """The response, or `_TransientError` where trying again may help, or a UserError where it will not."""
    url = request.full_url
    try:
        return _opener().open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and request.has_header("Range"):  # the file has become shorter: ask for all of it
            request.remove_header("Range")
            request.remove_header("If-range")
            return _open(request, timeout_s)
        if error.code in _TRANSIENT_STATUS:
            raise _TransientError(f"the server answered {error.code} {error.reason}") from error
        advice = (
            "Check the address" if error.code in (404, 410) else "The server refuses; check the address and your access"
        )
        raise UserError(f"Cannot download {url}: the server answered {error.code} {error.reason}. {advice}.") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise UserError(
                f"Cannot download {url}: its certificate is not valid ({error.reason.verify_message}). Check the clock "
                "and the certificates of this machine."
            ) from error
        raise _TransientError(f"{error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(f"{error or type(error).__name__}") from error


def _read(response: IO[bytes]) -> bytes:
    """The next block of a body, b"" at its end."""
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _TransientError(f"the connection broke ({error or type(error).__name__})") from error
