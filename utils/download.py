"""Files from the network, and archives unpacked without trusting them.

A download goes to `<target>.part` and is renamed when it is whole, so an interrupted one goes on where it stopped. An
archive is unpacked into a hidden folder beside its target and moved into place when it is whole.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import lzma
import os
import re
import shutil
import ssl
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from utils.errors import UserError

GIB = 1 << 30
MAX_DOWNLOAD_BYTES = 200 * GIB
MAX_UNPACKED_BYTES = 400 * GIB
MAX_MEMBERS = 10_000_000
_BLOCK = 1 << 20
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Interrupted(Exception):
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


def fetch(
    url: str,
    target: Path,
    *,
    max_bytes: int = MAX_DOWNLOAD_BYTES,
    progress: bool = True,
    attempts: int = 3,
    backoff_s: float = 1.0,
    timeout_s: float = 30.0,
) -> Path:
    """Download `url` to `target`; a target that exists is taken as it is.

    Args:
        url: http or https, redirects included.
        target: the file; its folder is made. An interrupted download stays in `<target>.part` and is continued by the
            next call if the server can and the file there is still the same (ETag or Last-Modified, else its length).
        max_bytes: refuse anything larger.
        progress: show a bar on stderr.
        attempts: tries in a row that bring nothing new before giving up.
        backoff_s: pause before the second try; it doubles with each further one, up to 30 s.
        timeout_s: longest silence of the server.

    Returns:
        `target`.

    Raises:
        UserError: the address is not http(s), the server refuses, the network fails, the file is too large, or the disk
            cannot take it.
    """
    if target.exists():
        return target
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"Cannot download '{url}': expected an address that starts with http:// or https://.")
    part = target.with_name(target.name + ".part")
    memory = part.with_name(part.name + ".json")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if target.exists():  # another process fetched it while this one waited
                part.unlink(missing_ok=True)
                return target
            _fetch_into(file, memory, url, target, max_bytes, progress, attempts, backoff_s, timeout_s)
            file.flush()
            os.fsync(file.fileno())
            part.replace(target)
        memory.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write {target}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


def _fetch_into(
    file: IO[bytes],
    memory: Path,
    url: str,
    target: Path,
    max_bytes: int,
    progress: bool,
    attempts: int,
    backoff_s: float,
    timeout_s: float,
) -> None:
    """Repeat transfers into `file` until it is whole."""
    furthest, failures = file.seek(0, os.SEEK_END), 0
    while True:
        try:
            return _transfer(file, memory, url, target.name, max_bytes, progress, timeout_s)
        except _Interrupted as error:
            # Only bytes never reached before count: a server that always starts over must not keep us for ever.
            size = file.seek(0, os.SEEK_END)
            failures = 1 if size > furthest else failures + 1
            furthest = max(furthest, size)
            if failures >= attempts:
                raise UserError(
                    f"Cannot download {url}: {error}. Check the network and run the command again (what has arrived is "
                    f"kept), or download the file by other means to {target}."
                ) from error
            time.sleep(min(backoff_s * 2 ** (failures - 1), 30.0))


def _transfer(
    file: IO[bytes], memory: Path, url: str, title: str, max_bytes: int, progress: bool, timeout_s: float
) -> None:
    """One request: the whole file, or what `file` lacks of it."""
    offset = file.seek(0, os.SEEK_END)
    known = _recall(memory, url) if offset else None
    if known is not None and offset == known["total"]:  # whole already: the process ended just before the rename
        return
    if known is None or offset > known["total"]:
        offset = 0
    headers = {"User-Agent": "tessera", "Accept-Encoding": "identity"}
    if offset and known is not None:
        headers["Range"] = f"bytes={offset}-"
        if known["validator"]:
            headers["If-Range"] = known["validator"]
    with _open(urllib.request.Request(url, headers=headers), timeout_s) as response:
        total: int | None
        if response.status == 206 and offset:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != offset or int(match[2]) != (known or {}).get("total"):
                file.truncate(0)
                raise _Interrupted("the file changed on the server during the download")
            total = int(match[2])
        elif response.status == 200:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            offset = 0
            file.truncate(0)
            etag = response.headers.get("ETag", "")
            # A weak ETag says "much the same", which is not enough to join two halves.
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
            memory.write_text(json.dumps({"url": url, "validator": validator, "total": total}))
        else:
            file.truncate(0)
            raise _Interrupted(f"the server answered {response.status}, expected 200 or 206")
        if total is not None and total > max_bytes:
            raise UserError(f"Cannot download {url}: it has {total:,} bytes, more than the limit of {max_bytes:,}.")
        with tqdm(
            total=total, initial=offset, unit="B", unit_scale=True, unit_divisor=1024, desc=title, disable=not progress
        ) as bar:
            received = offset
            while block := _read(response):
                received += len(block)
                if received > max_bytes:
                    file.truncate(0)
                    raise UserError(f"Cannot download {url}: it has more than the limit of {max_bytes:,} bytes.")
                file.write(block)
                bar.update(len(block))
    if total is not None and received != total:
        raise _Interrupted(f"the connection ended after {received:,} of {total:,} bytes")


def _recall(memory: Path, url: str) -> dict[str, Any] | None:
    """What is known of the file that a part belongs to; None where it is another file or cannot be continued."""
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
    """The response, or `_Interrupted` where trying again may help, or a UserError where it will not."""
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
            raise _Interrupted(f"the server answered {error.code} {error.reason}") from error
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
        raise _Interrupted(f"{error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(f"{error or type(error).__name__}") from error


def _read(response: IO[bytes]) -> bytes:
    """The next block of a body, b"" at its end."""
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(f"the connection broke ({error or type(error).__name__})") from error


class _Member(NamedTuple):
    """A file or a folder of an archive."""

    name: str
    is_folder: bool
    size: int
    open: Any  # () -> IO[bytes]


def unpack(archive: Path, target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES, max_members: int = MAX_MEMBERS) -> None:
    """Unpack a zip, tar or compressed tar into the folder `target`, all of it or nothing.

    Only plain files and folders are made, with fresh permissions. Folders that exist are merged, files replaced.

    Raises:
        UserError: a path that leaves `target`, a link, a device, more than `max_bytes` or `max_members`, a damaged or
            encrypted archive, or a disk without room. Nothing is left behind then.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unpacking"))
    try:
        total = 0
        for count, member in enumerate(_members(archive), 1):
            path = staging / _safe_name(archive, member.name)
            total += member.size
            if total > max_bytes or count > max_members:
                raise UserError(
                    f"{archive}: unpacks to more than the limit of {max_bytes:,} bytes or {max_members:,} files. If "
                    "you trust it, unpack it by hand."
                )
            if member.size > shutil.disk_usage(staging).free:
                raise UserError(
                    f"{archive}: no room to unpack it in {target}. Free some space or choose another folder."
                )
            if member.is_folder:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, path.open("wb") as file:
                shutil.copyfileobj(source, file, _BLOCK)
                if file.tell() != member.size:
                    raise UserError(
                        f"{archive}: '{member.name}' is damaged. Delete the archive and run the command again."
                    )
        staging.chmod(0o777 & ~_umask())
        _merge(staging, target)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{archive}: damaged ({error}). Delete it and run the command again.") from error
    except (NotImplementedError, RuntimeError) as error:  # what zipfile raises for passwords and rare compressions
        raise UserError(f"{archive}: cannot be unpacked ({error}). Unpack it by hand.") from error
    except OSError as error:
        raise UserError(f"{archive}: cannot be unpacked to {target}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _members(archive: Path) -> Iterator[_Member]:
    """The members in order; links, devices and the like are refused."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            for info in pack.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _unsafe(archive, info.filename, "is a link or a device")
                yield _Member(info.filename, info.is_dir(), info.file_size, lambda info=info: pack.open(info))
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tape:
            for entry in tape:
                if not (entry.isreg() or entry.isdir()):
                    raise _unsafe(archive, entry.name, "is a link or a device")
                size = entry.size if entry.isreg() else 0
                yield _Member(entry.name, entry.isdir(), size, lambda entry=entry: tape.extractfile(entry))
                tape.members = []  # type: ignore[attr-defined]  # it remembers every header: memory without end
    else:
        raise UserError(
            f"{archive}: expected a zip, a tar or a compressed tar. Delete it and check the address it came from."
        )


def _safe_name(archive: Path, name: str) -> PurePosixPath:
    """The member's path, if it stays inside the target on every system."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        raise _unsafe(archive, name, "leads out of the folder")
    return path


def _unsafe(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{archive}: refused, '{name}' {why}. Nothing was unpacked.")


def _merge(source: Path, target: Path) -> None:
    """Move `source` to `target`, folder into folder where both exist."""
    if not target.is_dir():
        source.replace(target)
        return
    for child in sorted(source.iterdir()):
        if child.is_dir():
            _merge(child, target / child.name)
        else:
            child.replace(target / child.name)


def _umask() -> int:
    """The process's file mode mask (mkdtemp makes private folders)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
