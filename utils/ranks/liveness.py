"""Liveness of ranks: the job's store, heartbeats by which ranks detect lost ranks, a watchdog over calls that may hang.

Heartbeat and watchdog are threads, so they work while the main thread waits in a collective. `open_world` owns both.

Rank 0 or torchrun serves the store (launch.py). torchrun's store outlives the ranks that it restarts. Keys:

    rendezvous/…            launch.py; overwritten by the next start of the ranks
    default/SESSION/…       torch's process groups of one start of the ranks
    tessera/SESSION/…       of one start: heartbeat/RANK, failure, device/RANK (launch.py), zero_first/… (world.py)
    tessera/kept/CALL/…     texts of `World.remember`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch._C._distributed_c10d import Store

from tessera.utils.environment import peer_timeout_s
from tessera.utils.machine.host import namespace
from tessera.utils.ranks.failures import exit_immediately, print_nonblocking

INTERVAL_S = 1.0  # of both threads
NOTICE_S = 5.0
POLL_S = 0.2  # between two questions to the store, which serves hundreds of ranks
GRACE_S = 10.0  # for a rank to end on its own after another rank has failed
STORE_LOST = "the connection to the job's store is lost: its host or its launcher is gone. The job is ended."
_SILENT_INTERVALS = 2.5  # a living rank publishes once in each
_ENDED = -1  # tick of a rank that has left the job


def read(store: Store, key: str) -> str | None:
    """Return the text of `key`; None without one."""
    return store.get(key).decode() if store.check([key]) else None


class FirstFailure(NamedTuple):
    """The first failure of a job. Its methods raise RuntimeError or OSError without a reachable store."""

    reporter: str  # "rank 1", or "heartbeat 1" for that rank's heartbeat thread
    exit_code: int  # of all ranks

    @property
    def rank(self) -> int:
        """The rank that reports it."""
        return int(self.reporter.split()[-1])

    def claim(self, store: Store) -> FirstFailure:
        """Record this as the job's first failure, unless there is one; return the recorded one."""
        return FirstFailure(*json.loads(store.compare_set("failure", "", json.dumps(self))))


@dataclass(eq=False)  # calls with equal fields are still different calls
class _Call:
    """A call in progress; see `Watchdog.watch`."""

    peer: str
    timeout_s: float
    notice: str
    waited_s: float = 0.0


class Watchdog:
    """Thread that ends this process when a watched call does not return, such as one to a frozen store.

    Watched calls must release the interpreter lock. `server` names the server of the job's store, as the subject of a
    message; `server_pid` is its process id on this machine, which is killed when it does not answer. `advice` returns
    the last line of each message by which a thread ends this process.
    """

    def __init__(self, rank: int, server: str) -> None:
        self.server_pid: int | None = None
        self.advice: Callable[[], str] = str
        self._rank, self._server = rank, server
        self._calls: list[_Call] = []
        self.is_reported = False  # the heartbeat or another rank has told why the job ends
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    @contextmanager
    def watch(self, peer: str = "", timeout_s: float | None = None, notice: str = "") -> Iterator[None]:
        """End the process when the body takes longer than `timeout_s`, by default TESSERA_PEER_TIMEOUT.

        `peer` must answer, by default the server of the store; `notice` is printed once after NOTICE_S seconds.
        """
        call = _Call(peer, timeout_s or peer_timeout_s(), notice)
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def watched(self, store: Store) -> Store:
        """Return `store` with every call watched: the store's own timeout does not cover a frozen server."""
        return cast(Store, _WatchedStore(store, self))

    def advised(self, message: str) -> str:
        """Return a message with the line of `advice`."""
        return f"{message}\n{self.advice()}".rstrip()

    def _run(self) -> None:
        clock = AwakeClock()
        while not self._closed.wait(INTERVAL_S):
            passed = clock.passed(INTERVAL_S)
            for call in list(self._calls):
                call.waited_s += passed
                if call.notice and call.waited_s > NOTICE_S:
                    print_nonblocking(call.notice)
                    call.notice = ""
                if call.waited_s > call.timeout_s:
                    if not call.peer and self.server_pid is not None:
                        _kill(self.server_pid)
                    message = f"{call.peer or self._server} has not answered for {call.waited_s:.0f} s"
                    text = "" if self.is_reported else self.advised(f"{message}: stopped, cut off or gone.")
                    exit_immediately(self._rank, text, 1)
                    return


class _WatchedStore:
    """A store whose calls, which never wait for a key, are watched."""

    def __init__(self, store: Store, watchdog: Watchdog) -> None:
        self._store, self._watchdog = store, watchdog

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            with self._watchdog.watch():
                return getattr(self._store, name)(*args)

        return call


class AwakeClock:
    """Clock of the time in which this process was running, not stopped or on a suspended machine."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self, interval_s: float) -> float:
        """Return the seconds since the last call, at most three times `interval_s`, the planned interval."""
        passed = time.monotonic() - self._last
        self._last += passed
        return min(passed, 3 * interval_s)


class Status(NamedTuple):
    """A rank's heartbeat message."""

    tick: int  # counts up while the process lives; -1 after it has left the job
    messages: int  # control messages that the rank has started
    host: str
    activity: str
    pid: int
    namespace: str  # of the process id; see `tessera.utils.machine.host.namespace`

    @property
    def pid_here(self) -> int | None:
        """The process id, if it is valid in this process's namespace."""
        return self.pid if self.namespace and self.namespace == namespace("pid") else None

    def is_dead(self) -> bool:
        """Return whether the rank ran on this machine, has not left the job, and its process is gone."""
        number = self.pid_here
        if number is None or self.tick == _ENDED:
            return False
        try:
            os.kill(number, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


class Heartbeat:
    """Thread that publishes this rank's status, and checks the status of the next rank.

    Once a second it publishes its status and reads two keys: the next rank's status, and the job's first failure. The
    store, of this session and watched, has its own connection: a waiting call blocks its connection.

    Attributes:
        activity: what the rank is doing.
        messages: number of control messages that it has started.
        first: the job's first failure, once this thread has read it.
    """

    def __init__(self, store: Store, rank: int, size: int, watchdog: Watchdog) -> None:
        self.activity = "starting"
        self.messages = 0
        self.first: FirstFailure | None = None
        self._store, self._rank, self._size, self._watchdog = store, rank, size, watchdog
        self._me = FirstFailure(f"heartbeat {rank}", 1)
        self._timeout_s = peer_timeout_s()
        self._tick, self._process = 0, (os.getpid(), namespace("pid"))
        self._closed = threading.Event()
        self._publish()  # from now on other ranks miss it
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, *, serves_store: bool = False) -> None:
        """Leave the job, after a regular end or a reported error; the rank that serves the store leaves last."""
        self._closed.set()
        self._thread.join(2 * INTERVAL_S)
        self._tick = _ENDED
        end = time.monotonic() + GRACE_S
        with suppress(RuntimeError, OSError):  # without a store no rank is left to read it
            self._publish()
            while serves_store and time.monotonic() < end and any(map(_is_here, self.statuses())):
                time.sleep(POLL_S)

    def statuses(self) -> list[Status | None]:
        """Return every rank's latest status; None where it never published one."""
        keys = [f"heartbeat/{rank}" for rank in range(self._size)]
        if self._store.check(keys):  # one call for hundreds of ranks
            return [Status(*json.loads(line)) for line in self._store.multi_get(keys)]
        return [self.status_of(rank) for rank in range(self._size)]

    def status_of(self, rank: int) -> Status | None:
        """Return the latest status of a rank; None where it never published one."""
        line = read(self._store, f"heartbeat/{rank}")
        return None if line is None else Status(*json.loads(line))

    def silent_ranks(self) -> list[tuple[int, Status]]:
        """Return the ranks that no longer publish and have not left the job; takes a few seconds."""
        try:
            before = self.statuses()
            time.sleep(_SILENT_INTERVALS * INTERVAL_S)
            pairs = enumerate(zip(before, self.statuses(), strict=True))
        except (RuntimeError, OSError):  # the store is gone
            return []
        return [(rank, a) for rank, (b, a) in pairs if a and b and a.tick == b.tick != _ENDED]

    def _publish(self) -> None:
        status = Status(self._tick, self.messages, socket.gethostname(), self.activity, *self._process)
        self._store.set(f"heartbeat/{self._rank}", json.dumps(status))

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._size
        status: Status | None = None
        silence_s, clock = 0.0, AwakeClock()
        try:
            while not self._closed.wait(INTERVAL_S):
                silence_s += clock.passed(INTERVAL_S)
                self._tick += 1
                self._publish()
                if failure := read(self._store, "failure"):
                    first = FirstFailure(*json.loads(failure))
                    if first.reporter != f"rank {self._rank}":
                        self.first, self._tick = first, _ENDED
                        self._publish()  # now the rank that serves the store may leave
                        self._end_after_grace("", first.exit_code)  # silently: another rank reports it
                        return
                previous, status = status, self.status_of(neighbour)
                silence_s = silence_s if status == previous else 0.0
                if status is not None and status.is_dead():
                    status = self.status_of(neighbour)  # it may have left the job meanwhile
                    if status is not None and status.tick != _ENDED:
                        self._report(lost_ranks_message([(neighbour, status)]))
                        return
                elif silence_s > self._timeout_s and (status is None or status.tick != _ENDED):
                    if status is not None and (number := status.pid_here) is not None:
                        _kill(number)
                    name = describe_rank(neighbour, status)
                    self._report(f"{name} has not answered for {silence_s:.0f} s. The job is ended.")
                    return
        except (RuntimeError, OSError):
            self._end_after_grace(STORE_LOST, 1)

    def _report(self, message: str) -> None:
        """Report a lost rank, unless a failure is reported already, and end this process."""
        first = self._me.claim(self._store)
        if first == self._me:
            print_nonblocking(f"rank {self._rank}: error: {self._watchdog.advised(message)}")
        self._end_after_grace("", first.exit_code)

    def _end_after_grace(self, message: str, exit_code: int) -> None:
        """End the process by force if the main thread does not end it in time."""
        self._watchdog.is_reported = not message
        if not self._closed.wait(GRACE_S):
            exit_immediately(self._rank, self._watchdog.advised(message) if message else "", exit_code)


def _is_here(status: Status | None) -> bool:
    return status is not None and status.tick != _ENDED and not status.is_dead()


def describe_rank(rank: int, status: Status | None) -> str:
    """Return a rank with its host and last activity, for messages."""
    return f"rank {rank} on {status.host} (last: {status.activity})" if status else f"rank {rank} (no heartbeat)"


def lost_ranks_message(lost: Iterable[tuple[int, Status]]) -> str:
    """Return the message for ranks that ended without reporting a reason."""
    names = ", ".join(describe_rank(rank, status) for rank, status in lost)
    return f"{names} is gone: killed, or its host is. See the launcher's lines, and dmesg on that host."


def _kill(pid: int) -> None:
    """Kill a rank on this machine with SIGKILL, the only signal that a stopped process handles."""
    with suppress(OSError):  # it has ended, or belongs to another user
        os.kill(pid, signal.SIGKILL)
