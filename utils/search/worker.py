"""The sign of life of a worker: whoever is killed cannot say so, but stops giving it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from pathlib import Path

from tessera.utils.errors import tolerate

FOLDER = "workers"
BEAT_S = 15.0
GONE_S = 180.0  # without a sign; beyond what a network's disk keeps in its caches


class Worker:
    """One of the processes that do the trainings of a search; a context manager that gives a sign of life inside.

    The sign is the time of a file in the folder of the search. Signs are compared with one another, so only the clock
    of the disk counts, not those of the hosts.

    Args:
        search: folder of the search.
        earlier: name of a worker that this one replaces, which is gone; "" where there is none.

    Attributes:
        name: of this worker.
    """

    def __init__(self, search: Path, earlier: str = "") -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._folder, self._earlier, self._over = search / FOLDER, earlier, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sign of life", daemon=True)

    def __enter__(self) -> Worker:
        self._folder.mkdir(exist_ok=True)
        self._own.touch()
        if self._earlier:
            (self._folder / self._earlier).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are at work
            self._folder.rmdir()

    def is_gone(self, name: str) -> bool:
        """Whether another worker has ended, or has given no sign for three minutes."""
        self._own.touch()
        try:
            sign = (self._folder / name).stat().st_mtime
        except FileNotFoundError:
            return True
        return self._own.stat().st_mtime - sign > GONE_S

    @property
    def _own(self) -> Path:
        return self._folder / self.name

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with tolerate("this worker's sign of life"):
                self._own.touch()
