"""Lock on a run directory, in which one process at a time writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from io import FileIO
from pathlib import Path

from tessera.utils.environment import lock_timeout_s
from tessera.utils.errors import UserError
from tessera.utils.files import LOCK, is_same_file, no_link
from tessera.utils.ranks.world import World
from tessera.utils.text import one_line, shown

log = logging.getLogger(__name__)

_ENDING = "a process that is ending"
_ROUND_S, _POLL_S = 1.0, 0.1
# Locks of this process as (process, device, inode): a record lock does not exclude its own process.
_HELD: set[tuple[int, int, int]] = set()


class RunLockedError(UserError):
    """Another process still writes to the run directory after the wait."""

    kind = "locked"
    exit_code = 4


class RunLock:
    """Lock on a file in a run directory; leaving this context manager releases it.

    A POSIX record lock ends with its process, even if that is killed. Unlike a lock of flock(2), forked loader workers,
    which may outlive a killed rank, do not inherit it. Closing any descriptor of the file releases it, so nothing else
    in this process may open the file.
    """

    def __init__(self, run: Path) -> None:
        self.run, self._path = run, run / LOCK
        self._file: FileIO | None = None
        self._made = False

    def take(self, *, new: bool = False) -> str | None:
        """Make the directory if it is missing, and take its lock; return None, or a description of the holder.

        With `new` an existing directory is not taken. A directory that cannot be written to is a UserError.
        """
        try:
            try:
                self.run.mkdir(parents=True)
                self._made = True
            except FileExistsError as error:
                if new and self.run.exists():
                    return "an earlier run"
                if not self.run.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "a part of it is a file, or a link to nothing") from error
            with contextlib.suppress(FileNotFoundError):  # it is made below
                if _key(self._path.stat()) in _HELD:
                    return "this process"
            try:
                file = FileIO(self._path, "a+", opener=no_link)
            except FileNotFoundError:
                return _ENDING
            with ExitStack() as stack:
                stack.enter_context(file)
                if holder := self._refusal(file):
                    return holder
                file.truncate(0)
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
                with contextlib.suppress(OSError):  # a file of another user, or a file system without modes
                    os.fchmod(file.fileno(), 0o600 | self.run.stat().st_mode & 0o666)  # who may write there may lock
                self._file = file
                _HELD.add(_key(os.fstat(file.fileno())))
                stack.pop_all()
        except OSError as error:
            raise UserError(
                f"Run directory {self.run}: cannot be made or written to ({error.strerror}). Expected a folder where "
                "this user may write. Choose another with --project and --name, or change its permissions."
            ) from error
        return None

    def _refusal(self, file: FileIO) -> str:
        """Lock the file; return "", or a description of the holder."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                return one_line(file.read(400).decode(errors="replace").strip(), 200) or "another process"
            log.warning(
                f"{self.run}: this file system has no locks ({error.strerror}). Start no second command for this run "
                "while this one is running: both would write there."
            )
        return "" if is_same_file(self._path, file) else _ENDING

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock, and remove the directory if it was made here and is still empty."""
        if self._file is None:
            return
        _HELD.discard(_key(os.fstat(self._file.fileno())))
        # A failing disk has ended the run with its own error. A lock file that stays behind is harmless.
        with contextlib.suppress(OSError), self._file:
            if is_same_file(self._path, self._file):
                self._path.unlink()
        if self._made:
            remove_if_empty(self.run)


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino


def remove_if_empty(run: Path) -> None:
    """Remove a directory that holds no file, only empty directories."""
    with contextlib.suppress(OSError):  # another process has taken it since
        if all(path.is_dir() and not path.is_symlink() for path in run.rglob("*")):
            for folder in sorted(run.rglob("*"), reverse=True):  # deepest first
                folder.rmdir()
            run.rmdir()


@contextmanager
def lock_run(run: Path, world: World, *, waits: bool = True, instead: str = "give another --name") -> Iterator[Path]:
    """Hold the lock on a run directory, which is made if it is missing. All ranks enter this; rank 0 has the lock.

    Files that were read there before may have changed after the wait.

    Args:
        waits: wait TESSERA_LOCK_TIMEOUT seconds for another process; otherwise raise immediately.
        instead: a remedy, for the message of RunLockedError, which is raised on every rank.
    """
    world.set_activity("waiting for the run directory")
    timeout_s = lock_timeout_s() if waits else 0.0
    end, warned = time.monotonic() + timeout_s, False
    with RunLock(run) as lock:

        def wait() -> str | None:
            """Wait for a round; after each the other ranks get a control message, whose timeout may be shorter."""
            until = min(time.monotonic() + _ROUND_S, end)
            while (holder := lock.take()) and time.monotonic() < until:
                time.sleep(_POLL_S)
            if holder and time.monotonic() >= end:
                after = f", after {timeout_s:g} s" if waits else ""
                longer = "; TESSERA_LOCK_TIMEOUT (seconds) waits longer" if waits else ""
                raise RunLockedError(
                    f"{shown(run)} is still being written by {holder}{after}; expected no other writer. Wait for its "
                    f"end or stop it, or {instead}{longer}."
                )
            return holder

        while holder := world.run_on_main(wait):
            if not warned:
                log.warning(f"{shown(run)} is being written by {holder}: waiting up to {timeout_s:g} s for its end.")
            warned = True
        yield run
