"""Files that appear whole or not at all, and files that several processes share."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal


def _umask() -> int:
    mask = os.umask(0o077)  # there is no way to read it alone
    os.umask(mask)
    return mask


# The process's file mode mask; mkstemp and mkdtemp ignore it and make private files and folders. Read once, at the
# import: of two threads that read it at a time, the second would find the first one's and set that for good.
UMASK = _umask()


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`; on success flush it to disk and rename it into place.

    A reader sees the old file or the new one, never a part; on an exception the old one stays and nothing is left over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)
        temporary.replace(path)
        _fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class SharedFile:
    """Where another process of this user and node can open a file, even one without a name.

    Attributes:
        path: the file.
        identity: device and inode of a file without a name: in another container its path may lead to another file.
    """

    path: Path
    identity: tuple[int, int] | None

    @classmethod
    def of(cls, file: IO[bytes]) -> SharedFile:
        """`file` of this process."""
        if os.fstat(file.fileno()).st_nlink > 0:
            return cls(Path(file.name), None)
        return cls(Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), _identity(file))

    def open(self, mode: Literal["rb", "r+b"]) -> IO[bytes]:
        """Open the file, unbuffered.

        Raises:
            OSError: it cannot be opened, or another file is there.
        """
        file = self.path.open(mode, buffering=0)
        if self.identity is not None and self.identity != _identity(file):
            file.close()
            raise FileNotFoundError(errno.ENOENT, "another file is there", str(self.path))
        return file


def _identity(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
