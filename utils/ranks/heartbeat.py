"""Heartbeat: every rank publishes that it lives and what it is doing, and notices a rank that is silent or failed.

A thread writes to the job's store once a second and reads two keys: the next rank's sign of life, and whether any rank
has failed. It needs no collective, so it works while the main thread waits in one, which is where a job would hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from tessera.utils.ranks.failures import FirstFailure
from tessera.utils.ranks.watchdog import OwnTime, leave, say

INTERVAL_S = 1.0
_LOOK = 2.5  # intervals; a living rank gives a sign in each
GRACE_S = 10.0  # for a rank to end by itself once another one has failed
STORE_LOST = "the connection to the job's store is lost: its host or its launcher is gone. The job is ended."


class Sign(NamedTuple):
    """A rank's sign of life.

    Attributes:
        tick: counts up while the process lives; -1 after a regular end.
        messages: control messages that the rank has entered.
        host, activity: where it is, and what it published last as its activity.
        process: its process id and the kernel that knows it by that; nothing after the id where that is unknown.
    """

    tick: int
    messages: int
    host: str
    activity: str
    process: str = ""

    def encode(self) -> str:
        """As one line."""
        return f"{self.tick}|{self.messages}|{self.host}|{self.process}|{self.activity}"

    @classmethod
    def decode(cls, line: bytes) -> Sign:
        """From `encode`."""
        tick, messages, host, process, activity = line.decode().split("|", 4)
        return cls(int(tick), int(messages), host, activity, process)


class Heartbeat:
    """This rank's signs of life, and its watch over the next rank.

    Args:
        store: a connection of its own, because a waiting call blocks its connection; one whose calls are watched, see
            WatchedStore.
        rank, size: this rank among all.
        host: name of this machine.
        timeout_s: silence of the next rank after which the job is ended, from the start on.
        end: called with a message and an exit code in place of leaving the process (for tests).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
        end: Callable[[str, int], None] | None = None,
    ) -> None:
        self.activity = "starting"
        self.messages = 0
        self._store, self._rank, self._size, self._host = store, rank, size, host
        self._reporter = f"heartbeat {rank}"
        self._timeout_s, self._end = timeout_s, end or (lambda message, code: leave(rank, message, code))
        self._tick, self._kernel = 0, _kernel()
        self._process = f"{os.getpid()} {self._kernel}"
        self._closed = threading.Event()
        self._publish()  # from now on it would be missed
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish that this rank has ended, regularly or with an error that it reported."""
        self._closed.set()
        self._thread.join(2 * INTERVAL_S)
        self._tick = -1
        try:
            self._publish()
        except (RuntimeError, OSError):  # the store went first: no rank is left to read it
            return

    def signs(self) -> list[Sign | None]:
        """Every rank's latest sign, None where it never gave one."""
        keys = [self._key(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return [Sign.decode(line) for line in self._store.multi_get(keys)]
        return [self._sign(rank) for rank in range(self._size)]

    def silent(self) -> list[tuple[int, Sign]]:
        """Ranks that show no more signs of life and have not ended regularly; takes a few seconds.

        A broken collective lets all ranks ask at once: the first of them looks, the others take what it has found.
        Where that is nobody, whoever asks later begins another turn.
        """
        try:
            turn = self._store.add("silent/turn", 0)
            key = f"silent/found/{turn}"
            if self._store.add(f"silent/asked/{turn}", 1) > 1 and (found := self._found_by_another(key)):
                return [(rank, Sign.decode(line.encode())) for rank, line in json.loads(found)]
            before = self.signs()
            time.sleep(_LOOK * INTERVAL_S)
            pairs = enumerate(zip(before, self.signs(), strict=True))
            lost = [(rank, a) for rank, (b, a) in pairs if a is not None and b is not None and a.tick == b.tick != -1]
            self._store.set(key, json.dumps([(rank, sign.encode()) for rank, sign in lost]))
            if not lost:
                self._store.add("silent/turn", 1)
        except (RuntimeError, OSError):  # the store is gone, and with it what it knew
            return []
        return lost

    def _found_by_another(self, key: str) -> bytes:
        """What the rank that looks for silent ones has found; nothing where it does not say so in time."""
        end = time.monotonic() + 2 * _LOOK * INTERVAL_S
        while not self._store.check([key]):
            if time.monotonic() > end:
                return b""
            time.sleep(INTERVAL_S / 2)
        return self._store.get(key)

    def process_here(self, rank: int) -> int | None:
        """Process id of another rank of this machine; None for one of another machine, and where it is unknown."""
        sign = self._sign(rank)
        return self._local_process(sign) if sign is not None and rank != self._rank else None

    def _sign(self, rank: int) -> Sign | None:
        """The latest sign of a rank; None where it never gave one."""
        key = self._key(rank)
        return Sign.decode(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"

    def _publish(self) -> None:
        self._store.set(
            self._key(self._rank), Sign(self._tick, self.messages, self._host, self.activity, self._process).encode()
        )

    def _beat(self) -> None:
        neighbour = (self._rank + 1) % self._size
        seen, silence_s, clock = -2, 0.0, OwnTime()
        while not self._closed.wait(INTERVAL_S):
            try:
                self._tick += 1
                self._publish()
                first = FirstFailure.read(self._store)
                if first is not None:
                    self._follow(first)
                    return
                # Once it has given a sign there always is one.
                sign = self._sign(neighbour) if seen == -2 else Sign.decode(self._store.get(self._key(neighbour)))
            except (RuntimeError, OSError):
                if not self._closed.is_set():
                    self._lose_store()
                return
            silence_s += clock.passed(INTERVAL_S)
            tick = -2 if sign is None else sign.tick
            if sign is not None and tick != -1 and self._is_dead(sign):
                self._report_dead(neighbour)
                return
            if tick not in (-1, seen):  # a regular end is no silence
                seen, silence_s = tick, 0.0
            elif tick != -1 and silence_s > self._timeout_s:
                first = self._claim()
                if sign is not None:
                    self._kill(sign)
                self._end(_is_silent(neighbour, sign, silence_s) if self._is_mine(first) else "", first.exit_code)
                return

    def _kill(self, sign: Sign) -> None:
        """Kill a silent rank of this machine: a stopped process handles no other signal of its launcher."""
        number = self._local_process(sign)
        if number is not None:
            with contextlib.suppress(OSError):  # it ended by itself, or is another user's
                os.kill(number, signal.SIGKILL)

    def _local_process(self, sign: Sign) -> int | None:
        """Process id of a rank of this machine; None for one of another."""
        number, kernel = sign.process.split(" ", 1)
        return int(number) if kernel and kernel == self._kernel else None

    def _is_dead(self, sign: Sign) -> bool:
        """Whether a rank is of this machine, and no such process is there any more."""
        number = self._local_process(sign)
        if number is None:
            return False
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def _report_dead(self, rank: int) -> None:
        """Report a rank that was killed, unless a failure is reported already; the main thread may wait for it."""
        try:
            sign = Sign.decode(self._store.get(self._key(rank)))  # its last sign may have come meanwhile
            if sign.tick == -1:
                return
            first = self._claim()
            if self._is_mine(first):
                self._print(is_gone([(rank, sign)]))
        except (RuntimeError, OSError):
            self._lose_store()
            return
        self._follow(first)

    def _claim(self) -> FirstFailure:
        """The job's first failure: this one, unless another rank or this one's own main thread was before."""
        return FirstFailure(self._reporter, 1).claim(self._store)

    def _is_mine(self, first: FirstFailure) -> bool:
        return first.reporter == self._reporter

    def _follow(self, first: FirstFailure) -> None:
        """The job has failed and the reason is reported: end silently, by force if the main thread cannot."""
        if not self._closed.wait(GRACE_S):
            self._end("", first.exit_code)

    def _lose_store(self) -> None:
        if not self._closed.wait(GRACE_S):
            self._end(STORE_LOST, 1)

    def _print(self, message: str) -> None:
        say(f"rank {self._rank}: error: {message}")


def _is_silent(rank: int, sign: Sign | None, seconds: float) -> str:
    """Message about a rank that shows no more signs of life."""
    if sign is None:
        return f"rank {rank} has given no sign of life for {seconds:.0f} s since the ranks met. The job is ended."
    return (
        f"rank {rank} on {sign.host} has not answered for {seconds:.0f} s; its last activity: {sign.activity}. The job "
        f"is ended; resume it with --resume."
    )


def is_gone(lost: Iterable[tuple[int, Sign]]) -> str:
    """Message about ranks that ended without reporting why."""
    named = ", ".join(f"rank {rank} on {sign.host} (last: {sign.activity})" for rank, sign in lost)
    return f"{named} is gone: killed, or its host is. See the launcher's lines, and dmesg on that host."


def _kernel() -> str:
    """This boot of this machine, and the namespace of its process ids; "" where this system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
