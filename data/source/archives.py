"""Safe unpacking of untrusted archives: only plain files and folders inside the target, all or none."""

from __future__ import annotations

import gzip
import lzma
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tessera.utils.errors import UserError
from tessera.utils.files import UMASK
from tessera.utils.text import one_line, shown

MAX_UNPACKED_BYTES = 400 << 30
MAX_MEMBERS = 10_000_000
MAX_DEPTH = 64
_BLOCK = 1 << 20
_LONGEST_EXTENSION = 1 << 20  # of a tar's header; it holds a long name, and is read into memory
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")  # types of pax and GNU headers
_DAMAGED_CONTENT = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError)
_DAMAGED_HEADER = (ValueError, LookupError, ArithmeticError, struct.error)


class _Member(NamedTuple):
    """A file or folder of an archive."""

    name: str
    is_folder: bool
    size: int
    open: Callable[[], Any]  # opens the content of a file


def unpack(archive: Path, target: Path) -> None:
    """Unpack a zip, tar or compressed tar into the folder `target`, all of it or nothing.

    Only plain files and folders are made, with fresh permissions. Folders that exist are merged, files replaced.

    Raises:
        UserError: a path that leaves `target`, a link, a device, more bytes or members than the limits, a damaged or
            encrypted archive, or a full disk. Nothing is left behind then.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".unpacking"))
    try:
        total = 0
        for count, member in enumerate(_members(archive), 1):
            path = staging / _safe_name(archive, member.name)
            total += member.size
            if total > MAX_UNPACKED_BYTES or count > MAX_MEMBERS:
                raise UserError(
                    f"{shown(archive)}: unpacks to more than the limit of {MAX_UNPACKED_BYTES:,} bytes or "
                    f"{MAX_MEMBERS:,} files. If you trust it, unpack it by hand."
                )
            if member.size > shutil.disk_usage(staging).free:
                raise UserError(
                    f"{shown(archive)}: no space to unpack it to {shown(target)}. Free some space or choose another "
                    "folder."
                )
            if member.is_folder:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, path.open("wb") as file:
                shutil.copyfileobj(source, file, _BLOCK)
                if file.tell() != member.size:
                    raise UserError(
                        f"{shown(archive)}: {shown(member.name)} is damaged. Delete the archive and run the command "
                        "again."
                    )
        staging.chmod(0o777 & ~UMASK)
        _merge(staging, target)
    except UserError:
        raise
    except (*_DAMAGED_CONTENT, *_DAMAGED_HEADER) as error:
        reason = one_line(str(error), 120)
        raise UserError(f"{shown(archive)}: damaged ({reason}). Delete it and run the command again.") from error
    except (NotImplementedError, RuntimeError) as error:  # of zipfile: passwords and rare compressions
        reason = one_line(str(error), 120)
        raise UserError(f"{shown(archive)}: cannot be unpacked ({reason}). Unpack it by hand.") from error
    except OSError as error:
        reason = one_line(error.strerror or str(error), 120)
        raise UserError(f"{shown(archive)}: cannot be unpacked to {shown(target)}: {reason}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _members(archive: Path) -> Iterator[_Member]:
    """Yield the members in order; raise for links and devices."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            for info in pack.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise _unsafe(archive, info.filename, "is a link or a device")
                yield _Member(info.filename, info.is_dir(), info.file_size, partial(pack.open, info))
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive, tarinfo=_Header) as tape:
            for entry in tape:
                if entry.size < 0:
                    raise tarfile.ReadError(f"the size of {shown(entry.name)} is {shown(entry.size)}")
                if not (entry.isreg() or entry.isdir()):
                    raise _unsafe(archive, entry.name, "is a link or a device")
                size = entry.size if entry.isreg() else 0
                yield _Member(entry.name, entry.isdir(), size, partial(tape.extractfile, entry))
                tape.members = []  # type: ignore[attr-defined]  # it would keep every header in memory
            _require_end(tape)
    else:
        raise UserError(
            f"{shown(archive)}: expected a zip, tar or compressed tar. Delete it and check the address it came from."
        )


class _Header(tarfile.TarInfo):
    """Tar header that raises for damage, where Python's own reader would end the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        """Parse a header; raise a ReadError if it is damaged, missing, or larger than any name needs."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # its end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error or 'a member'} where a member or the end should be") from error
        if header.type in _EXTENSIONS and header.size > _LONGEST_EXTENSION:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        return header


def _require_end(tape: tarfile.TarFile) -> None:
    """Raise unless only zeros follow the end of a tar; reading them verifies the checksum of a compressed one."""
    assert tape.fileobj is not None, "it is open"
    while block := tape.fileobj.read(_BLOCK):
        if block.count(0) != len(block):
            raise tarfile.ReadError("data follow its end")


def _safe_name(archive: Path, name: str) -> PurePosixPath:
    """Return the member's path if it stays inside the target on every system."""
    path = PurePosixPath(name)
    if len(path.parts) > MAX_DEPTH:
        raise _unsafe(archive, name, f"lies more than {MAX_DEPTH} folders deep")
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        raise _unsafe(archive, name, "leads out of the folder")
    return path


def _unsafe(archive: Path, name: str, why: str) -> UserError:
    return UserError(f"{shown(archive)}: refused, {shown(name)} {why}. Nothing was unpacked.")


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
