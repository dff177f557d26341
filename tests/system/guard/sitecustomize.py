"""Python imports this by itself where PYTHONPATH has its folder: nothing may talk, start programs or write elsewhere.

GUARD_LOG names the file that each attempt is written to, and GUARD_FOLDERS those where writing is allowed. An attempt
fails as well, but the log is what counts: libraries hide what their own attempts come to. What compiled code does
by itself is not seen; tests/system/test_traced.py is for that.
"""

from __future__ import annotations

import os
import socket
import subprocess  # noqa: F401, before fork_exec is replaced: it has an event of its own
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = os.open(os.environ["GUARD_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
FOLDERS = [Path(folder).resolve() for folder in (*os.environ["GUARD_FOLDERS"].split(os.pathsep), "/dev", "/proc")]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
TALKING = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
ASKING = (  # how the commands that may be run begin: they say which libraries and fonts there are, and which commit
    ("/sbin/ldconfig", "-p"),
    ("fc-list", "--help"),
    ("fc-list", "--format=%{file}\\n"),
    ("git", "--no-optional-locks"),
)
CHANGING = {  # which of an event's arguments are paths
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime"), slice(1)),
    **dict.fromkeys(("os.rename", "os.link"), slice(2)),
    "os.symlink": slice(1, 2),
}


def refuse(what: str) -> None:
    """Write it down, then fail.

    Raises:
        PermissionError: always.
    """
    os.write(LOG, (what.replace("\n", "\\n") + "\n").encode(errors="backslashreplace"))
    raise PermissionError(f"guard: {what}")


def is_here(host: object) -> bool:
    """Whether an address is this machine's own."""
    text = host.decode() if isinstance(host, bytes) else host
    return text in (None, "", "localhost", "::1", "0.0.0.0", "::") or str(text).startswith("127.")


def check_path(event: str, path: object, folder_fd: object = None) -> None:
    """Refuse a place outside the folders; numbers are files that are open already."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return
    inside = isinstance(folder_fd, int) and folder_fd >= 0
    start = Path(f"/dev/fd/{folder_fd}").readlink() if inside else Path.cwd()
    whole = Path(os.path.normpath(start / os.fsdecode(path)))
    place = whole.parent.resolve() / whole.name  # itself, not what it links to: that is what would change
    if not any(map(place.is_relative_to, FOLDERS)):
        refuse(f"{event}: {place}")


def asks(command: list[Any]) -> bool:
    """Whether a command is one of those that only say something."""
    return any(tuple(command[: len(start)]) == start for start in ASKING)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """What Python is about to do."""
    if event == "open":
        path, mode, flags = arguments
        if (flags or 0) & WRITING or set(mode or "") & set("wax+"):
            check_path(event, path)
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        check_path(event, arguments[0], folder_fd=arguments[-1])
    elif event in CHANGING:
        for path in arguments[CHANGING[event]]:
            check_path(event, path)
    elif event in LOOKUPS:
        if not is_here(arguments[0]):
            refuse(f"{event}: {arguments[0]}")
    elif event in TALKING:
        sock, address = arguments[0], arguments[-1]
        if sock.family in (socket.AF_INET, socket.AF_INET6) and address and not is_here(address[0]):
            refuse(f"{event}: {address}")
    elif event in PROGRAMS and not (event == "subprocess.Popen" and asks(arguments[1])):
        refuse(f"{event}: {arguments[:2]}")


def watched(fork_exec: Callable[..., int]) -> Callable[..., int]:
    """What multiprocessing starts its own helpers with, which no event tells of; nothing else may use it."""

    def start(arguments: list[Any], executables: list[Any], *rest: Any) -> int:
        words = [os.fsdecode(word) for word in arguments]
        code = words[words.index("-c") + 1] if "-c" in words[:-1] else ""
        if os.fsdecode(executables[0]) != sys.executable or not code.startswith("from multiprocessing."):
            refuse(f"fork_exec: {words}")
        return fork_exec(arguments, executables, *rest)

    return start


if sys.platform != "win32":
    import _posixsubprocess

    _posixsubprocess.fork_exec = watched(_posixsubprocess.fork_exec)
sys.addaudithook(watch)
