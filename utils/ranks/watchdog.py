"""Watchdog: ends this process where a call does not return, as one to a store whose keeper is frozen never does."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from tessera.utils.environment import peer_timeout_s

INTERVAL_S = 1.0
NOTICE_S = 5.0
_PRINTING_S = 5.0


class OwnTime:
    """Seconds in which this process could act: while it was stopped, or its machine asleep, it has missed nobody."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self, interval_s: float) -> float:
        """Seconds since the last call, which was planned `interval_s` ago; at most three times that."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        return min(passed, 3 * interval_s)


class Pause:
    """Between two questions to the store: short at first, longer the longer nothing new is found.

    Without it hundreds of ranks that wait for one would ask thousands of times a second.
    """

    _SHORTEST_S, _LONGEST_S, _GROWTH = 0.01, 1.0, 1.25

    def __init__(self) -> None:
        self._seconds = self._SHORTEST_S

    def reset(self) -> None:
        """Something new was found: more may follow at once."""
        self._seconds = self._SHORTEST_S

    def wait(self, most_s: float = math.inf) -> None:
        """Sleep, at most `most_s` seconds."""
        time.sleep(min(self._seconds, most_s))
        self._seconds = min(self._seconds * self._GROWTH, self._LONGEST_S)


@dataclass(eq=False)  # two may look alike, and each ends by itself
class _Call:
    """A call that is under way.

    Attributes:
        answers: who has to answer it, as the begin of a sentence.
        timeout_s: after so many seconds the process ends.
        notice: printed once where the call takes seconds; "" = nothing.
        is_store: the store's keeper is to answer.
        waited_s: seconds so far.
    """

    answers: str
    timeout_s: float
    notice: str
    is_store: bool
    waited_s: float = 0.0


class Watchdog:
    """Ends this process where a call does not return. The thread needs the interpreter: watched calls must release it.

    Args:
        rank: of this process.
        end: called with a message in place of leaving the process (for tests).

    Attributes:
        keeper: process id of a rank on this machine that keeps the store. It is killed when the store does not answer:
            a stopped process handles no signal of its launcher.
    """

    def __init__(self, rank: int, end: Callable[[str], None] | None = None) -> None:
        self.keeper: int | None = None
        self._end = end or (lambda message: leave(rank, message, 1))
        self._calls: list[_Call] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    @contextmanager
    def over(
        self, answers: str, timeout_s: float | None = None, notice: str = "", is_store: bool = False
    ) -> Iterator[None]:
        """Inside, this thread waits for `answers`, and the process ends where that takes too long.

        Args:
            answers: who has to answer, as the begin of a sentence.
            timeout_s: seconds; TESSERA_PEER_TIMEOUT where None.
            notice: printed once after some seconds of waiting; "" = nothing.
            is_store: the store's keeper is to answer.
        """
        call = _Call(answers, peer_timeout_s() if timeout_s is None else timeout_s, notice, is_store)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def _watch(self) -> None:
        clock = OwnTime()
        while not self._closed.wait(INTERVAL_S):
            passed = clock.passed(INTERVAL_S)
            for call in list(self._calls):
                call.waited_s += passed
                if call.notice and call.waited_s > NOTICE_S:
                    say(call.notice)
                    call.notice = ""
                if call.waited_s > call.timeout_s:
                    if call.is_store:
                        self._kill_keeper()
                    self._end(f"{call.answers} has not answered for {call.waited_s:.0f} s: stopped, cut off or gone.")
                    return

    def _kill_keeper(self) -> None:
        if self.keeper is not None:
            with suppress(OSError):  # it ended by itself
                os.kill(self.keeper, signal.SIGKILL)


class WatchedStore(Store):
    """The job's store, where every call is watched: the store's own time limit does not cover a frozen keeper.

    Args:
        store: the store itself.
        watchdog: of this process.
        keeper: whose store it is, as the begin of a sentence.
    """

    def __init__(self, store: Store, watchdog: Watchdog, keeper: str) -> None:
        super().__init__()
        self._store, self._watchdog, self._keeper = store, watchdog, keeper

    def set(self, key: str, value: str) -> None:
        """As Store.set."""
        with self._watchdog.over(self._keeper, is_store=True):
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As Store.get, of a key that is there."""
        with self._watchdog.over(self._keeper, is_store=True):
            return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """As Store.check."""
        with self._watchdog.over(self._keeper, is_store=True):
            return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As Store.multi_get, of keys that are there."""
        with self._watchdog.over(self._keeper, is_store=True):
            return self._store.multi_get(keys)

    def add(self, key: str, value: int) -> int:
        """As Store.add."""
        with self._watchdog.over(self._keeper, is_store=True):
            return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As Store.compare_set."""
        with self._watchdog.over(self._keeper, is_store=True):
            return self._store.compare_set(key, expected, desired)


def leave(rank: int, message: str, exit_code: int) -> None:
    """End this process at once, whatever its other threads do; print `message` before, if there is one."""
    if message:
        say(f"rank {rank}: error: {message}")
    os._exit(exit_code)


def say(line: str) -> None:
    """Print a line to stderr, from a thread of its own: nobody may read there, and this one has more to do."""
    thread = threading.Thread(target=lambda: print(line, file=sys.stderr, flush=True), daemon=True)
    thread.start()
    thread.join(_PRINTING_S)
