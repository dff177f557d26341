"""The heartbeat of a worker: whoever is killed cannot say so, but its heart stops."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from pathlib import Path

from tessera.utils.errors import tolerate

BEAT_S = 15.0
GONE_S = 180.0  # without a beat; beyond what a network's disk keeps in its caches


class Worker:
    """One of the processes that do the trainings of a search.

    Its heartbeat is the time of a hidden file in the folder of the search. These are compared with one another, so only
    the clock of the disk counts, not those of the hosts.

    Args:
        search: folder of the search.
        earlier: name of a worker that this one replaces, which is gone; "" where there is none.

    Attributes:
        name: of this worker.
    """

    def __init__(self, search: Path, earlier: str) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._search, self._earlier, self._over = search, earlier, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Begin the heartbeat."""
        self._file(self.name).touch()
        if self._earlier:
            self._file(self._earlier).unlink(missing_ok=True)
        self._thread.start()

    def end(self) -> None:
        """End it: from now on this worker is gone."""
        self._over.set()
        self._thread.join()
        self._file(self.name).unlink(missing_ok=True)

    def is_gone(self, name: str) -> bool:
        """Whether another worker has ended, or has had no heartbeat for three minutes."""
        own = self._file(self.name)
        own.touch()
        try:
            last = self._file(name).stat().st_mtime
        except FileNotFoundError:
            return True
        return own.stat().st_mtime - last > GONE_S

    def _file(self, name: str) -> Path:
        return self._search / f".worker-{name}"

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with tolerate("this worker's heartbeat"):
                self._file(self.name).touch()
