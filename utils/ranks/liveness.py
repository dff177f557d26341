"""What ends a process that hangs: a watchdog over its calls, and heartbeats, by which the ranks miss one another.

Both are threads, so they work while the main thread waits in a collective, which is where a job would hang.
`open_world` owns both; the watchdog begins before the job's store is asked, and ends after the process group.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from tessera.utils.environment import peer_timeout_s
from tessera.utils.machine.host import namespace
from tessera.utils.ranks.failures import FirstFailure, exit_at_once, print_without_waiting

INTERVAL_S = 1.0  # of both threads
NOTICE_S = 5.0
GRACE_S = 10.0  # for a rank to end by itself once another one has failed
STORE_LOST = "the connection to the job's store is lost: its host or its launcher is gone. The job is ended."
_LOOK = 2.5  # intervals; a living rank gives a sign in each
_ENDED = -1  # the tick of a goodbye


class AwakeClock:
    """Seconds in which this process could act: while it was stopped, or its machine asleep, it has missed nobody."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self, interval_s: float) -> float:
        """Return the seconds since the last call, which was planned `interval_s` ago; at most three times that."""
        passed = time.monotonic() - self._last
        self._last += passed
        return min(passed, 3 * interval_s)


@dataclass(eq=False)  # two may look alike, and each ends by itself
class _Call:
    """A call that is under way; see `Watchdog.over`."""

    answers: str
    timeout_s: float
    notice: str
    waited_s: float = 0.0


class Watchdog:
    """Ends this process where a call does not return, as one to a store whose server is frozen never does.

    The thread needs the interpreter: watched calls must release it.

    Args:
        rank: of this process.
        server: of the job's store, as the beginning of a sentence.

    Attributes:
        server_pid: of the server where it is a rank on this machine, which is killed when the store does not answer.
    """

    def __init__(self, rank: int, server: str) -> None:
        self.server_pid: int | None = None
        self._rank, self._server = rank, server
        self._calls: list[_Call] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    @contextmanager
    def over(self, answers: str = "", timeout_s: float | None = None, notice: str = "") -> Iterator[None]:
        """Inside, this thread waits for `answers`, and the process ends where that takes too long.

        Args:
            answers: who has to answer, as the beginning of a sentence; "" = the server of the job's store.
            timeout_s: seconds; TESSERA_PEER_TIMEOUT where None.
            notice: printed once after some seconds of waiting; "" = nothing.
        """
        call = _Call(answers, timeout_s or peer_timeout_s(), notice)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def watched(self, store: Store) -> Store:
        """The job's store with this watchdog over every call: its own time limit does not cover a frozen server."""
        return _WatchedStore(store, self)

    def _watch(self) -> None:
        clock = AwakeClock()
        while not self._closed.wait(INTERVAL_S):
            passed = clock.passed(INTERVAL_S)
            for call in list(self._calls):
                call.waited_s += passed
                if call.notice and call.waited_s > NOTICE_S:
                    print_without_waiting(call.notice)
                    call.notice = ""
                if call.waited_s > call.timeout_s:
                    if not call.answers and self.server_pid is not None:
                        _kill(self.server_pid)
                    who = call.answers or self._server
                    message = f"{who} has not answered for {call.waited_s:.0f} s: stopped, cut off or gone."
                    exit_at_once(self._rank, message, 1)
                    return


def _watched(name: str) -> Any:
    """A method of Store, watched."""

    def call(self: _WatchedStore, *args: Any) -> Any:
        with self._watchdog.over():
            return getattr(self._store, name)(*args)

    return call


class _WatchedStore(Store):
    """The methods of a store that never wait for a key, watched."""

    def __init__(self, store: Store, watchdog: Watchdog) -> None:
        super().__init__()
        self._store, self._watchdog = store, watchdog

    set, add, compare_set = _watched("set"), _watched("add"), _watched("compare_set")
    get, multi_get, check = _watched("get"), _watched("multi_get"), _watched("check")


class Sign(NamedTuple):
    """A rank's sign of life."""

    tick: int  # counts up while the process lives; -1 after a regular end
    messages: int  # control messages that the rank has entered
    host: str
    activity: str
    pid: int
    namespace: str  # where the process id is valid; see `tessera.utils.machine.host.namespace`

    @classmethod
    def decode(cls, line: bytes) -> Sign:
        """Read a sign from JSON."""
        return cls(*json.loads(line))

    @property
    def pid_here(self) -> int | None:
        """Its process id, where that is valid for this process too."""
        return self.pid if self.namespace and self.namespace == namespace("pid") else None

    def is_dead(self) -> bool:
        """Whether the rank is of this machine, has not said goodbye, and its process is gone."""
        number = self.pid_here
        if number is None or self.tick == _ENDED:
            return False
        try:
            os.kill(number, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


class Heartbeat:
    """This rank's signs of life, and its watch over the next rank.

    Once a second it publishes that it lives and what it is doing, and reads two keys: the next rank's sign of life, and
    whether any rank has failed.

    Args:
        store: of this start of the ranks, watched, with a connection of its own: a waiting call blocks its connection.
        rank, size: this rank among all.

    Attributes:
        activity, messages: what the rank is doing, and how many control messages it has entered.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.activity = "starting"
        self.messages = 0
        self._store, self._rank, self._size = store, rank, size
        self._me = FirstFailure(f"heartbeat {rank}", 1)
        self._timeout_s = peer_timeout_s()
        self._tick, self._place = 0, (os.getpid(), namespace("pid"))
        self._closed = threading.Event()
        self._publish()  # from now on it would be missed
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye: this rank has ended, regularly or with an error that it reported."""
        self._closed.set()
        self._thread.join(2 * INTERVAL_S)
        self._tick = _ENDED
        with suppress(RuntimeError, OSError):  # the store went first: no rank is left to read it
            self._publish()

    def signs(self) -> list[Sign | None]:
        """Return every rank's latest sign; None where it never gave one."""
        keys = [_key(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return [Sign.decode(line) for line in self._store.multi_get(keys)]
        return [self.sign_of(rank) for rank in range(self._size)]

    def sign_of(self, rank: int) -> Sign | None:
        """The latest sign of a rank; None where it never gave one."""
        key = _key(rank)
        return Sign.decode(self._store.get(key)) if self._store.check([key]) else None

    def silent(self) -> list[tuple[int, Sign]]:
        """Ranks that show no more signs of life and have not ended regularly; takes a few seconds."""
        try:
            before = self.signs()
            time.sleep(_LOOK * INTERVAL_S)
            pairs = enumerate(zip(before, self.signs(), strict=True))
        except (RuntimeError, OSError):  # the store is gone, and with it what it knew
            return []
        return [(rank, a) for rank, (b, a) in pairs if a and b and a.tick == b.tick != _ENDED]

    def _publish(self) -> None:
        sign = Sign(self._tick, self.messages, socket.gethostname(), self.activity, *self._place)
        self._store.set(_key(self._rank), json.dumps(sign))

    def _beat(self) -> None:
        neighbour = (self._rank + 1) % self._size
        sign: Sign | None = None
        silence_s, clock = 0.0, AwakeClock()
        try:
            while not self._closed.wait(INTERVAL_S):
                silence_s += clock.passed(INTERVAL_S)
                self._tick += 1
                self._publish()
                if (first := FirstFailure.read(self._store)) is not None:
                    self._end_after_grace("", first.exit_code)  # silently: the reason is reported
                    return
                seen, sign = sign, self.sign_of(neighbour)
                silence_s = silence_s if sign == seen else 0.0
                if sign is not None and sign.is_dead():
                    sign = self.sign_of(neighbour)  # its goodbye may have come meanwhile
                    if sign is not None and sign.tick != _ENDED:
                        self._report_dead(neighbour, sign)
                        return
                elif silence_s > self._timeout_s and (sign is None or sign.tick != _ENDED):
                    self._report_silent(neighbour, sign, silence_s)
                    return
        except (RuntimeError, OSError):
            self._end_after_grace(STORE_LOST, 1)

    def _report_dead(self, rank: int, sign: Sign) -> None:
        """Report a rank that was killed, unless a failure is reported already; the main thread may wait for it."""
        first = self._me.claim(self._store)
        if first == self._me:
            print_without_waiting(f"rank {self._rank}: error: {is_gone([(rank, sign)])}")
        self._end_after_grace("", first.exit_code)

    def _report_silent(self, rank: int, sign: Sign | None, seconds: float) -> None:
        """Report a rank that gives no more signs, unless a failure is reported already; on this machine, kill it."""
        first = self._me.claim(self._store)
        if sign is None:
            found = f"rank {rank} has given no sign of life for {seconds:.0f} s since the ranks met. The job is ended."
        else:
            if (number := sign.pid_here) is not None:
                _kill(number)
            found = (
                f"rank {rank} on {sign.host} has not answered for {seconds:.0f} s; its last activity: {sign.activity}. "
                f"The job is ended; resume it with --resume."
            )
        exit_at_once(self._rank, found if first == self._me else "", first.exit_code)

    def _end_after_grace(self, message: str, exit_code: int) -> None:
        """End the process by force, where the main thread cannot end it by itself."""
        if not self._closed.wait(GRACE_S):
            exit_at_once(self._rank, message, exit_code)


def where(rank: int, sign: Sign | None) -> str:
    """A rank as messages name it."""
    return f"rank {rank} on {sign.host} (last: {sign.activity})" if sign else f"rank {rank} (no sign of life)"


def is_gone(lost: Iterable[tuple[int, Sign]]) -> str:
    """Say that ranks ended without reporting why."""
    named = ", ".join(where(rank, sign) for rank, sign in lost)
    return f"{named} is gone: killed, or its host is. See the launcher's lines, and dmesg on that host."


def _kill(pid: int) -> None:
    """Kill a rank of this machine that does not answer: a stopped process handles no other signal of its launcher."""
    with suppress(OSError):  # it ended by itself, or is another user's
        os.kill(pid, signal.SIGKILL)
