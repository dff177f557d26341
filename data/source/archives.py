"""Archives unpacked without trusting them: plain files and folders inside the target, all of them or none."""

from __future__ import annotations

import lzma
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from utils.errors import UserError
from utils.files import UMASK

MAX_UNPACKED_BYTES = 400 << 30
MAX_MEMBERS = 10_000_000
_BLOCK = 1 << 20


class _Member(NamedTuple):
    """A file or a folder of an archive."""

    name: str
    is_folder: bool
    size: int
    open: Callable[[], IO[bytes]]


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
        staging.chmod(0o777 & ~UMASK)
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
                yield _Member(info.filename, info.is_dir(), info.file_size, partial(pack.open, info))
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tape:
            for entry in tape:
                if not (entry.isreg() or entry.isdir()):
                    raise _unsafe(archive, entry.name, "is a link or a device")
                size = entry.size if entry.isreg() else 0
                yield _Member(entry.name, entry.isdir(), size, partial(_content, tape, entry))
                tape.members = []  # type: ignore[attr-defined]  # it remembers every header: memory without end
    else:
        raise UserError(
            f"{archive}: expected a zip, a tar or a compressed tar. Delete it and check the address it came from."
        )


def _content(tape: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    content = tape.extractfile(entry)
    assert content is not None, "only plain files are opened"
    return content


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
