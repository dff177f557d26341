"""One tracker in a daemon thread of its own, behind a bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from tessera.utils.report.trackers.tracker import Tracker

log = logging.getLogger(__name__)


CALL_S = 600.0  # a call that takes longer, even the upload of a checkpoint, counts as hung
CLOSE_S = 60.0  # at the end, for all trackers together, to send what they still hold
CLOSE_FAILED_S = 3.0  # the same after an error, which must end all ranks within seconds
MOST_CALLS = 1000  # that a tracker may be behind; each holds a few numbers or a path


class Channel:
    """One tracker in its own daemon thread.

    Args:
        name: for messages.
        open_tracker: called in the thread, for it may wait for a server.

    Attributes:
        alive: the tracker has not been switched off.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self.alive = True
        self._open = open_tracker
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_CALLS)
        self._busy_since: float | None = time.monotonic()  # None while it waits for a call
        self._off = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call, unless the tracker is off or hangs; None closes the tracker when all calls are done."""
        since = self._busy_since
        if self.alive and since is not None and time.monotonic() - since > CALL_S:
            self._switch_off(f"a call has not returned for {CALL_S:g} s")
        if not self.alive:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._switch_off(f"it is {MOST_CALLS} calls behind")

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, on the monotonic clock."""
        if self.alive:
            self._thread.join(max(deadline - time.monotonic(), 0))
            if self._thread.is_alive():
                self._switch_off("it did not finish in time; what it had not sent yet is lost")
        self.alive = False

    def _work(self) -> None:
        try:
            tracker = self._open()
            while True:
                self._busy_since = None
                call = self._calls.get()
                self._busy_since = time.monotonic()
                if not self.alive:
                    return
                if call is None:
                    tracker.close()
                    return
                call(tracker)
        except BaseException as error:  # a tracker may even call sys.exit(), and must not end more than its thread
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        """Stop using the tracker; one warning, whoever notices first."""
        with self._off:
            if not self.alive:
                return
            self.alive = False
        log.warning("%s is switched off, the run continues without it: %s", self.name, why)
