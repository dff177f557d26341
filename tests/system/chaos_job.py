"""Jobs of a few ranks forked from a process that has all modules imported: torchrun without the import time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from tessera.utils.ranks import liveness
from tests.system.hosts import DEVICE, Host
from tests.system.jobs import tell_where
from tests.system.launch import Outcome, free_port

_NETWORK = 0x40000000  # CLONE_NEWNET


class ForkedJob(contextlib.AbstractContextManager["ForkedJob"]):
    """Ranks, and one launcher per host, which waits for them and with `keeps_store` has the job's store."""

    def __init__(
        self,
        run: Callable[[], int],
        folder: Path,
        env: dict[str, str],
        keeps_store: bool,
        hosts: Sequence[Host] = (),
        ranks: int = 2,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._said = folder, folder / "said"
        self._said.write_text("")
        for old in folder.glob("pid*"):
            old.unlink()
        self._codes: dict[int, int] = {}
        self.seen: set[int] = set()
        address = {"MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1", "MASTER_PORT": str(free_port())}
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if keeps_store else {}
        interface = {"GLOO_SOCKET_IFNAME": DEVICE} if hosts else {}
        self._env = {**env, **address, **store, **interface, "WORLD_SIZE": str(ranks)}
        self._keeps_store, self._run = keeps_store, run
        numbers = [*range(ranks)]
        shares = [numbers[: ranks // 2], numbers[ranks // 2 :]] if hosts else [numbers]
        self.launchers = [self._fork(share, *hosts[n : n + 1]) for n, share in enumerate(shares)]

    def _fork(self, ranks: Sequence[int], host: Host | None = None) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            said = os.open(self._said, os.O_WRONLY | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.environ.update(self._env)
            if host is not None:
                _enter(host)
            code = self._launch(ranks)
        finally:
            os._exit(code)

    def _launch(self, ranks: Sequence[int]) -> int:
        """Fork ranks and wait for them; 0 where all end with 0. A rank notices by itself that another one is gone."""
        living = {self._fork_rank(rank, number) for number, rank in enumerate(ranks)}
        keeps = self._keeps_store and 0 in ranks
        port = int(os.environ["MASTER_PORT"])
        timeout = timedelta(minutes=5)
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timeout) if keeps else None
        failed = False
        while living:
            pid, status = os.wait()
            living.discard(pid)
            failed |= status != 0
        if store is not None and not failed:
            time.sleep(2 * (len(ranks) < int(os.environ["WORLD_SIZE"])))  # the other host's may still say that they end
        return int(failed)

    def _fork_rank(self, rank: int, local: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            place = {"RANK": rank, "LOCAL_RANK": local}
            os.environ.update({name: str(value) for name, value in place.items()})
            new = self._folder / f"new{rank}"
            new.write_text(str(os.getpid()))
            new.replace(self._folder / f"pid{rank}")
            code = self._run()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def wait(self, timeout: float) -> Outcome | None:
        """Return how it ended; None where it runs longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self._ended():
            if time.monotonic() > end:
                return None
            time.sleep(max(min(end - time.monotonic(), 0.02), 0))
        return Outcome(max(map(abs, self._codes.values())), "", self.said)

    def _ended(self) -> bool:
        for launcher in self.launchers:
            if launcher not in self._codes:
                pid, status = os.waitpid(launcher, os.WNOHANG)
                if pid:
                    self._codes[launcher] = os.waitstatus_to_exitcode(status)
        return len(self._codes) == len(self.launchers)

    def processes(self) -> dict[int, int]:
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) in self.launchers and state not in "ZX":
                    found[int(folder.name)] = int(parent)
        return found

    def note(self) -> None:
        self.seen |= set(self.processes())

    def rank(self, number: int) -> int | None:
        """Return the process id of a rank; None where there is no such process."""
        noted = self._folder / f"pid{number}"
        pid = int(noted.read_text()) if noted.is_file() else 0
        return pid if pid in self.processes() else None

    def descendants(self, pid: int) -> set[int]:
        """Return a process and all that it started: of a rank, its loader workers."""
        parents = self.processes()
        found = {pid}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def tell_where(self) -> None:
        tell_where(self.processes())

    def kill(self) -> list[int]:
        """Kill every process by its id; return the ids."""
        killed: list[int] = []
        for launcher in self.launchers:
            if launcher not in self._codes:
                os.kill(launcher, signal.SIGKILL)  # it may not have its session yet
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += pids
            time.sleep(0.01)
        for launcher in self.launchers:
            if launcher not in self._codes:
                self._codes[launcher] = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        return killed


def _enter(host: Host) -> None:
    """Move this process into a host's network; its ranks know no process of the other host."""
    with Path("/run/netns", host.namespace).open() as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {host.namespace}")
    liveness.namespace = lambda kind: host.namespace  # type: ignore[assignment]
