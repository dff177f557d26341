"""HTTP downloads from untrusted servers, by urllib3 and resumable, and safe unpacking of archives.

Addresses are http or https; sizes and the time of each read are limited.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from tessera.utils.errors import UserError
from tessera.utils.files import UMASK, no_link, open_plain, write_whole
from tessera.utils.text import one_line, shown

if TYPE_CHECKING:  # importing urllib3 opens a socket to check for IPv6: only requests import it
    from urllib3 import BaseHTTPResponse

    from tessera.utils.types import Archive  # which imports torch

MAX_DOWNLOAD_BYTES = 200 << 30
MAX_UNPACKED_BYTES = 400 << 30
MAX_MEMBERS = 10_000_000
MAX_DEPTH = 64
_BLOCK = 1 << 20
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_ADDRESS = 4096
_MOST_REDIRECTS = 10
_LONGEST_VALIDATOR = 256
_LONGEST_EXTENSION = 1 << 20  # of a tar's header; it holds a long name, and is read into memory
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")  # types of pax and GNU headers

logger = logging.getLogger(__name__)


class TransientError(Exception):
    """Error that a retry may fix."""


@dataclass(frozen=True)
class NetworkLimits:
    """Limits for slow or failing servers."""

    attempts: int = 3  # consecutive attempts without progress
    pause_s: float = 1.0  # before the first retry; doubles with each one
    timeout_s: float = 30.0  # of connecting and of each read

    def wait(self, failures: int) -> None:
        """Sleep after consecutive failures."""
        time.sleep(self.pause_s * 2 ** (failures - 1))


LIMITS = NetworkLimits()


def redacted(address: str) -> str:
    """Return an address without its password, as messages name it."""
    return one_line(re.sub(r"(//[^/?#@:]*):[^/?#]*@", r"\1:***@", address), 200)


def check_address(url: str, what: str) -> None:
    """Raise a UserError unless `url` is a usable address; messages start with `what`, as in "Cannot download"."""
    message = f"{what} '{redacted(url)}'"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        usable = url.isascii() and url.isprintable() and " " not in url and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UserError(f"{message}: not an address ({one_line(str(error), 80)}).") from error
    if not known:
        raise UserError(f"{message}: expected an address that starts with http:// or https://.")
    if not usable or len(url) > _LONGEST_ADDRESS:
        raise UserError(
            f"{message}: expected an address of at most {_LONGEST_ADDRESS:,} characters. Percent-encode blanks and "
            "non-ASCII characters."
        )


def open_address(url: str, headers: dict[str, str] | None = None) -> BaseHTTPResponse:
    """Send a GET request and return the response, to be closed; credentials are not sent to redirect targets.

    The proxy is the one that the environment sets.

    Raises:
        TransientError: a retry may succeed.
        UserError: a retry will not.
    """
    from urllib3 import PoolManager, ProxyManager, Retry, make_headers
    from urllib3.exceptions import HTTPError, MaxRetryError, ResponseError, SSLError

    parts = urlsplit(url)
    account, _, host = parts.netloc.rpartition("@")
    sent = {"User-Agent": "tessera", "Accept-Encoding": "identity", **(headers or {})}
    sent |= make_headers(basic_auth=unquote(account)) if account else {}
    proxy = None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)
    proxy_account = unquote(urlsplit(proxy).netloc.rpartition("@")[0]) if proxy else ""
    message = f"Cannot download {redacted(url)}"
    try:
        pool = (
            ProxyManager(proxy, proxy_headers=make_headers(proxy_basic_auth=proxy_account or None))
            if proxy
            else PoolManager()
        )
        response = pool.request(
            "GET",
            parts._replace(netloc=host, fragment="").geturl(),
            headers=sent,
            timeout=LIMITS.timeout_s,
            retries=Retry(total=None, connect=0, read=0, status=0, other=0, redirect=_MOST_REDIRECTS),
            preload_content=False,
            decode_content=False,
            enforce_content_length=False,
        )
    except (HTTPError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, MaxRetryError) and error.reason else error
        if isinstance(reason, SSLError):
            text = f"{one_line(str(reason), 200)}. Check the clock and the certificates of this machine."
        elif isinstance(reason, ResponseError):
            text = f"it redirects more than {_MOST_REDIRECTS} times. Check the address."
        elif isinstance(reason, ValueError):  # of urllib3 and idna
            text = f"it redirects to no address ({one_line(str(reason), 100)})."
        else:
            raise _connection_error(reason) from error
        raise UserError(f"{message}: {text}") from error
    try:
        _check_response(response, message, is_https=url.startswith("https:"))
    except BaseException:
        response.close()
        raise
    return response


def _check_response(response: BaseHTTPResponse, message: str, *, is_https: bool) -> None:
    """Raise unless a response has the content, as it is, or refuses the range."""
    for step in response.retries.history if response.retries else ():
        if is_https and (step.redirect_location or "").startswith("http:"):
            raise UserError(
                f"{message}: it redirects to '{one_line(step.redirect_location or '', 100)}', which is not https."
            )
    if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
        answer = f"the server answered {response.status} {one_line(str(response.reason), 100)}"
        if response.status in _TRANSIENT_STATUS:
            raise TransientError(answer)
        raise UserError(f"{message}: {answer}. Check the address and your access.")
    encoding = one_line(response.headers.get("Content-Encoding", "identity"), 50).strip().lower()
    # aws-chunked is left over from an upload; some servers say gzip of a .gz file, whose bytes these are.
    is_gzip_file = encoding in ("gzip", "x-gzip") and message.partition("?")[0].endswith((".gz", ".tgz"))
    if encoding not in ("", "identity", "aws-chunked") and not is_gzip_file:
        raise UserError(
            f"{message}: the server sends it encoded ({encoding}), expected identity, as requested. Download the file "
            "by other means."
        )


def read_blocks(response: BaseHTTPResponse, url: str, total: int | None, most: int, offset: int = 0) -> Iterator[bytes]:
    """Yield the content of a response to `open_address` in blocks as they arrive, after `offset` received before.

    The whole file has `total` bytes, None = unknown, and at most `most`.

    Raises:
        TransientError: the connection broke, ended early, or timed out.
        UserError: the size exceeds `most`.
    """
    from urllib3.exceptions import HTTPError

    received, stated = offset, total or 0
    while True:
        if max(received, stated) > most:
            found = f"{stated:,} bytes, more" if stated > most else "more"
            raise UserError(f"Cannot download {redacted(url)}: it has {found} than the limit of {most:,} bytes.")
        try:
            block = response.read1(_BLOCK)
        except (HTTPError, OSError) as error:
            raise _connection_error(error) from error
        if not block:
            break
        received += len(block)
        yield block
    if total is not None and received != total:
        raise TransientError(f"the connection ended after {received:,} of {total:,} bytes")


def _connection_error(error: Exception) -> TransientError:
    return TransientError(f"the connection broke ({one_line(str(error) or type(error).__name__, 100)})")


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
    check_address(url, "Cannot download")
    part, state = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "a+b", opener=no_link) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if target.exists():  # another process fetched it while this one waited
                part.unlink(missing_ok=True)
                return target
            _complete(url, target, file, state, max_bytes)
            file.flush()
            os.fsync(file.fileno())
            if accept is not None:
                try:
                    accept(part)
                except UserError:
                    file.truncate(0)  # keep the file, as another process may wait for its lock
                    raise
            part.replace(target)
        state.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write {shown(target)}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


def _complete(url: str, target: Path, file: IO[bytes], state: Path, most: int) -> None:
    """Repeat transfers into `file` until it is complete; new bytes renew the attempts."""
    furthest, failures = file.seek(0, os.SEEK_END), 0
    while True:
        try:
            return _transfer(url, target, file, state, most)
        except TransientError as error:
            size = file.seek(0, os.SEEK_END)
            failures = 1 if size > furthest else failures + 1
            furthest = max(furthest, size)
            if failures >= LIMITS.attempts:
                resumed = " to resume" if _resumable(state, url) else ""
                raise UserError(
                    f"Cannot download {redacted(url)}: {error}. Check the network and run the command again"
                    f"{resumed}, or download the file by other means to {shown(target)}."
                ) from error
            LIMITS.wait(failures)


def _transfer(url: str, target: Path, file: IO[bytes], state: Path, most: int) -> None:
    """Request the file, or the rest that `file` lacks, and append it."""
    offset = file.seek(0, os.SEEK_END)
    validator, total = (_resumable(state, url) if offset else None) or ("", -1)
    if offset == total:  # the process was killed just before the rename
        return
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset < total else {}
    with open_address(url, headers) as response:
        if response.status == HTTPStatus.PARTIAL_CONTENT and headers:
            length: int | None = total
            if response.headers.get("Content-Range") != f"bytes {offset}-{total - 1}/{total}":
                file.truncate(0)
                raise TransientError("the file changed on the server during the download")
        else:
            offset = 0
            file.truncate(0)
            if response.status != HTTPStatus.OK:
                raise TransientError(f"the server answered {response.status}, expected 200 or 206")
            length, etag = response.length_remaining, response.headers.get("ETag", "")
            # A weak ETag does not promise equal bytes.
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
            write_whole(state, json.dumps({"url": url, "validator": validator, "total": length}).encode())
        with tqdm(
            total=length, initial=offset, desc=target.name, disable=None, unit="B", unit_scale=True, unit_divisor=1024
        ) as bar:
            try:
                for block in read_blocks(response, url, length, most, offset):
                    file.write(block)
                    bar.update(len(block))
            except UserError:  # too large
                file.truncate(0)
                raise


def _resumable(state: Path, url: str) -> tuple[str, int] | None:
    """Return validator and length of the server's file that a part belongs to; None if it cannot be resumed."""
    try:
        with open_plain(state, 1 << 16) as file:
            found = json.load(file)
        validator, total = found["validator"], found["total"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    usable = isinstance(validator, str) and validator.isascii() and validator.isprintable() and type(total) is int
    return (validator, total) if usable and found["url"] == url and 0 < len(validator) <= _LONGEST_VALIDATOR else None


def fetch_archives(archives: Iterable[Archive], staging: Path, target: Path) -> Path:
    """Download and unpack the archives of `target` into a folder below `staging`; resumes an interrupted call."""
    contents = staging / "contents"
    for archive in archives:
        name = PurePosixPath(urlsplit(archive.url).path).name or "archive"
        key = hashlib.blake2b("\0".join(archive).encode(), digest_size=4).hexdigest()
        done = staging / f"{key}.done"
        if not done.exists():
            logger.info("Downloading %s for %s", archive.url, target)
            file = fetch(archive.url, staging / f"{key}-{name}")
            unpack(file, contents / archive.into)
            done.touch()
            file.unlink()
    return contents


def unpack(archive: Path, target: Path) -> None:
    """Unpack a zip, tar or compressed tar into the folder `target`, all of it or nothing.

    Folders that exist are merged, files replaced.

    Raises:
        UserError: a path that leaves `target`, a link, a device, more bytes or members than the limits, a damaged or
            encrypted archive, or a full disk. Nothing is left behind then.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unpacking"))
    try:
        _extract(archive, staging)
        staging.chmod(0o777 & ~UMASK)
        _merge(staging, target)
    except UserError:
        raise
    except OSError as error:
        reason = one_line(error.strerror or str(error), 120)
        raise UserError(f"{shown(archive)}: cannot be unpacked to {shown(target)}: {reason}.") from error
    except Exception as error:  # zipfile, tarfile and their decompressors raise errors of many kinds
        reason = one_line(str(error) or type(error).__name__, 120)
        raise UserError(
            f"{shown(archive)}: damaged or encrypted ({reason}). Delete it and run the command again, or unpack it by "
            "hand."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _extract(archive: Path, staging: Path) -> None:
    members = total = 0

    def check(name: str, size: int, is_plain: bool) -> None:
        nonlocal members, total
        members, total = members + 1, total + max(size, 0)
        path, why = PurePosixPath(name), ""
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
            why = "leads out of the folder"
        elif len(path.parts) > MAX_DEPTH:
            why = f"lies more than {MAX_DEPTH} folders deep"
        elif not is_plain:
            why = "is a link or a device"
        elif size < 0:
            why = f"has the size {size}"
        if why:
            raise UserError(f"{shown(archive)}: refused, {shown(name)} {why}. Nothing was unpacked.")
        if total > MAX_UNPACKED_BYTES or members > MAX_MEMBERS:
            raise UserError(
                f"{shown(archive)}: unpacks to more than the limit of {MAX_UNPACKED_BYTES:,} bytes or {MAX_MEMBERS:,} "
                "files. If you trust it, unpack it by hand."
            )

    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            for info in pack.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                check(info.filename, info.file_size, kind in (0, stat.S_IFREG, stat.S_IFDIR))
                pack.extract(info, staging)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, tarinfo=_Header) as tape:
            for entry in tape:
                check(entry.name, entry.size, entry.isreg() or entry.isdir())
                tape.extract(entry, staging, filter="data")
                tape.members = []  # type: ignore[attr-defined]  # it would keep every header in memory
            # Reading on verifies the checksum of a compressed archive.
            assert tape.fileobj is not None, "it is open"
            while block := tape.fileobj.read(_BLOCK):
                if block.count(0) != len(block):
                    raise tarfile.ReadError("data follow its end")
    else:
        raise UserError(
            f"{shown(archive)}: expected a zip, tar or compressed tar. Delete it and check the address it came from."
        )


class _Header(tarfile.TarInfo):
    """Tar header that raises if it is damaged or too large; tarfile would end the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the end of the archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error or 'a member'} where a member or the end should be") from error
        if header.type in _EXTENSIONS and header.size > _LONGEST_EXTENSION:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        return header


def _merge(source: Path, target: Path) -> None:
    """Move `source` to `target`, and merge folders that exist in both."""
    if not target.is_dir():
        source.replace(target)
        return
    for child in sorted(source.iterdir()):
        if child.is_dir():
            _merge(child, target / child.name)
        else:
            child.replace(target / child.name)
