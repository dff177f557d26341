"""Resumable downloads, which arrive as `<target>.part`, and safe unpacking of untrusted archives."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tqdm import tqdm

from tessera.utils import http_client
from tessera.utils.errors import UserError
from tessera.utils.files import UMASK, is_same_file, no_link, open_plain, write_whole
from tessera.utils.http_client import TransientError, redacted_address
from tessera.utils.text import one_line, shown

MAX_DOWNLOAD_BYTES = 200 << 30
MAX_UNPACKED_BYTES = 400 << 30
MAX_MEMBERS = 10_000_000
MAX_DEPTH = 64
_LONGEST_VALIDATOR = 256
_BLOCK = 1 << 20
_LONGEST_EXTENSION = 1 << 20  # of a tar's header; it holds a long name, and is read into memory
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")  # types of pax and GNU headers


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
            if failures >= http_client.LIMITS.attempts:
                resumed = " to resume" if _resumable(state, url) else ""
                raise UserError(
                    f"Cannot download {redacted_address(url)}: {error}. Check the network and run the command again"
                    f"{resumed}, or download the file by other means to {shown(target)}."
                ) from error
            http_client.LIMITS.wait(failures)


def _transfer(url: str, target: Path, file: IO[bytes], state: Path, most: int) -> None:
    """Request the file, or the rest that `file` lacks, and append it."""
    offset = file.seek(0, os.SEEK_END)
    validator, total = (_resumable(state, url) if offset else None) or ("", -1)
    if offset == total:  # the process was killed just before the rename
        return
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset < total else {}
    with http_client.open_address(url, headers) as response:
        if response.status == HTTPStatus.PARTIAL_CONTENT and headers:
            part, _, whole = response.headers.get("Content-Range", "").partition("/")
            if not part.startswith(f"bytes {offset}-") or whole != str(total):
                file.truncate(0)
                raise TransientError("the file changed on the server during the download")
            length: int | None = total
        else:
            offset = 0
            file.truncate(0)
            if response.status != HTTPStatus.OK:
                raise TransientError(f"the server answered {response.status}, expected 200 or 206")
            length, etag = http_client.stated_length(response), response.headers.get("ETag", "")
            # A weak ETag does not promise equal bytes.
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
            write_whole(state, json.dumps({"url": url, "validator": validator, "total": length}).encode())
        units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        with tqdm(total=length, initial=offset, desc=target.name, disable=None, **units) as bar:
            try:
                for block in http_client.read_blocks(response, url, length, most, offset):
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
