"""File helpers: user paths, plain files, atomic writes, files shared between processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from tessera.utils.errors import ConfigError, UserError
from tessera.utils.text import shown

NO_DIRECTORY = "the working directory was deleted. Change to one that exists."
_SEAL, _LONGEST_CACHE = 20, 1 << 30  # bytes
LOCK = ".lock"  # of a run directory
SHARED_MEMORY = Path("/dev/shm")  # in-memory file system of Linux
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux and of most file systems
_HOST = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
_ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_ADDRESS_AS_PATH = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")  # `Path` merges slashes; C:/ is a drive
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

log = logging.getLogger(__name__)


# File mode mask of the process, which mkstemp and mkdtemp ignore. To read it is to set it, which is not thread-safe, so
# it is read once, at the import.
UMASK = os.umask(0o077)
os.umask(UMASK)


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success rename it to `path`, if `durable` after flushing it to disk.

    A reader sees the old file or the new one. After an exception the old file is intact, and nothing is left over. A
    link at `path` is replaced, not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, temporary = open_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)  # while it is locked
        if durable:
            _fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cached_content(path: Path, state: bytes, make: Callable[[], bytes]) -> bytes:
    """Return the result of `make`, cached in the file `path` while `state` is equal and the file undamaged.

    `state` is everything that the content depends on. If the cache cannot be written, a warning is logged.
    """
    try:
        with open_plain(path, _LONGEST_CACHE) as file:
            found = file.read()
    except OSError:
        found = b""
    content = found[_SEAL:]
    if found[:_SEAL] == _seal(state, content):
        return content
    content = make()
    try:
        remove_leftovers(path.parent)
        with atomic_write(path) as file:
            file.writelines([_seal(state, content), content])
    except OSError as error:
        log.warning(
            "Cannot write the cache %s (%s): its content is computed at every start. Set TESSERA_CACHE to a writable "
            "directory.",
            path,
            error.strerror,
        )
    return content


def _seal(state: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(hashlib.blake2b(state).digest() + content, digest_size=_SEAL).digest()


def write_whole(path: Path, content: bytes) -> None:
    """Write one of many results as `atomic_write`, without waiting for the disk; raise OSError if that fails."""
    with atomic_write(path, durable=False) as file:
        file.write(content)


def short_name(name: str, most: int) -> str:
    """Return a file name of at most `most` bytes: a longer one is cut and ends in a digest of the whole."""
    encoded = os.fsencode(name)
    if len(encoded) <= most:
        return name
    end = f"~{_digest(name)}"
    return encoded[: most - len(end)].decode(errors="ignore") + end


def _digest(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=4).hexdigest()


def remove_leftovers(folder: Path, *, of_any_host: bool = False) -> None:
    """Remove temporary files in `folder` that a killed process has left there, see `open_temporary`.

    A living process holds a lock on its file. On a file system that does not share locks between hosts, files of other
    hosts may be in use: they are removed only with `of_any_host`, for a directory that no other host uses.
    """
    host = "[A-Za-z0-9-]*" if of_any_host else _HOST
    made = re.compile(rf"\..+\.[a-z0-9_]{{8}}\.{host}\.tmp(\.mp4)?", re.DOTALL)  # as of open_temporary
    for path in folder.glob(".*.tmp*"):
        if made.fullmatch(path.name):
            # "r+" as NFS needs it for a lock. Errors: locked, gone, or of another user.
            with contextlib.suppress(OSError), open(path, "r+b", opener=no_link) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Return whether `path` still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


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


def open_temporary(path: Path, ending: str = "") -> tuple[IO[bytes], Path]:
    """Create a file for writing `path`: beside it, hidden, with a short ASCII name that nobody can foresee.

    It is locked while it is open, if the file system has locks.
    """
    while True:
        descriptor, name = tempfile.mkstemp(f".{_HOST}.tmp{ending}", f".{_digest(path.name)}.", path.parent)
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o666 & ~UMASK)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # otherwise removed as a leftover before it was locked
            return os.fdopen(descriptor, "wb"), Path(name)
        os.close(descriptor)


def no_link(path: str, flags: int) -> int:
    """Open a file of this program that has a known name, as `opener` of `open`: a link there may lead anywhere.

    Raises:
        OSError: it cannot be opened, or is a link; `strerror` says so.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # without waiting for the reader of a FIFO
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, f"{path} is a link, expected a plain file or none; remove the link") from error


def user_path(text: str | Path, where: str) -> Path:
    """Return a path given by a user, `~` expanded; `where` names its origin in errors, such as "--data".

    Raises:
        ConfigError: an address, an impossible path, or the user of `~user` is unknown.
    """
    check_path(text, where)
    if _ADDRESS_AS_PATH.match(str(text)):
        raise ConfigError(
            f"{where}: found the address {shown(str(text))}, expected a path of this machine. Mount the storage as a "
            "folder, or copy to and from it with a program of its own."
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{where}: found {shown(str(text))}, whose home directory is unknown. Write the path in full."
        ) from error


def reachable_path(text: str | Path, where: str) -> Path:
    """Return a path as of `user_path`; UserError if it is in a folder that may not be entered."""
    path = user_path(text, where)
    try:
        path.stat()
    except PermissionError as error:
        raise UserError(
            f"{where}: {shown(str(text))} cannot be reached ({error.strerror}). Allow its folders to be entered."
        ) from error
    except OSError:  # such as a missing file, which the caller explains
        pass
    return path


def working_directory() -> Path | None:
    """Return the working directory; None if it was deleted, such as below a notebook that runs in it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def absolute_path(path: Path) -> Path:
    """Return a path from the root on, `..` and links as they are; UserError if its start was deleted."""
    if not path.is_absolute() and working_directory() is None:
        raise UserError(f"{shown(path)}: {NO_DIRECTORY}")
    return path.absolute()


def is_address(text: str) -> bool:
    """Return whether a text is a URL, such as http://…, not a path."""
    return "://" in text and _ADDRESS.match(text) is not None


def check_path(text: str | Path, where: str) -> None:
    """Raise ConfigError for an impossible path: it holds a NUL, is too long, or cannot be encoded.

    The system would raise a different kind of error for each.
    """
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: found {shown(str(text))}, expected a path; this is no text.") from error
    if b"\0" in encoded:
        raise ConfigError(f"{where}: found {shown(str(text))}, expected a path; none holds a NUL character.")
    if len(encoded) > LONGEST_PATH or max(map(len, encoded.split(b"/"))) > LONGEST_NAME:
        raise ConfigError(
            f"{where}: found {shown(str(text))}, expected a path of at most {LONGEST_PATH:,} bytes, each name in it at "
            f"most {LONGEST_NAME}."
        )


def files_below(folder: str | Path, suffixes: Collection[str]) -> Iterator[str]:
    """Yield paths below a folder that end in one of `suffixes`, such as ".jpg", in no order.

    Links are followed, each folder is entered once; hidden files and folders are skipped.

    Raises:
        UserError: a folder cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    pending = [str(folder)]
    while pending:
        current = pending.pop()
        try:
            state = os.stat(current)  # noqa: PTH116 - a hundred thousand Path objects cost seconds
            if (state.st_dev, state.st_ino) in seen:  # a link that leads back up
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if suffix_of(entry.name) in suffixes:
                        yield entry.path
                    elif entry.is_dir():
                        pending.append(entry.path)
        except OSError as error:
            raise UserError(f"{shown(Path(current))}: the folder cannot be read ({error.strerror}).") from error


def suffix_of(name: str) -> str:
    """Return the suffix of a file name in lower case, as `os.path.splitext` unless the name starts with a dot."""
    return name[name.rfind(".") :].lower() if "." in name else ""


def special_file_kind(path: Path | str) -> str:
    """Return what a path names other than a plain file, such as "a folder"; "" for a plain file or nothing."""
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except OSError:
        return ""
    return "" if kind == stat.S_IFREG else _KINDS.get(kind, "of an unknown kind")


def open_plain(path: Path | str, most: int | None = None) -> IO[bytes]:
    """Open a plain file, or a link to one, for reading. A FIFO would block, and a device may act.

    Raises:
        OSError: it cannot be opened, is no plain file, or has more than `most` bytes; `strerror` says what it is.
    """
    if kind := special_file_kind(path):
        number = errno.EISDIR if kind == _KINDS[stat.S_IFDIR] else errno.EINVAL
        raise OSError(number, f"it is {kind}, expected a plain file", str(path))
    if most is not None and (size := Path(path).stat().st_size) > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the limit of {most:,}", str(path))
    return Path(path).open("rb")


@dataclass(frozen=True)
class SharedFile:
    """Path by which other processes of this user and host can open a file, even an unnamed one."""

    path: Path
    identity: tuple[int, int] | None  # device and inode of an unnamed file

    @classmethod
    def of(cls, file: IO[bytes]) -> SharedFile:
        """Return the path of an open file of this process."""
        if os.fstat(file.fileno()).st_nlink > 0:
            return cls(Path(file.name), None)
        return cls(Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), _identity(file))

    def open(self, mode: Literal["rb", "r+b"]) -> IO[bytes]:
        """Open the file, unbuffered; raise OSError if that fails or another file is there."""
        file = self.path.open(mode, buffering=0)
        if self.identity is not None and self.identity != _identity(file):
            file.close()
            raise FileNotFoundError(errno.ENOENT, "another file is there", str(self.path))
        return file


def _identity(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the digest of a file's content in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
