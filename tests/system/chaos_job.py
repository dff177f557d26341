"""Jobs of a few ranks forked from a process that has all modules imported: torchrun without the import time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore

from tests.system.jobs import tell_where
from tests.system.launch import Outcome, free_port


class ForkedJob(contextlib.AbstractContextManager["ForkedJob"]):
    """Ranks, and a launcher, which waits for them and with `keeps_store` has the job's store."""

    def __init__(
        self, run: Callable[[], int], folder: Path, env: dict[str, str], keeps_store: bool, ranks: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._said = folder, folder / "said"
        self._said.write_text("")
        for old in folder.glob("pid*"):
            old.unlink()
        self._code: int | None = None
        self.seen: set[int] = set()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if keeps_store else {}
        self._env = {**env, **address, **store}
        self._keeps_store, self._run, self._ranks = keeps_store, run, ranks
        self.launcher = self._fork()

    def _fork(self) -> int:
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
            code = self._launch()
        finally:
            os._exit(code)

    def _launch(self) -> int:
        """Fork ranks and wait for them; 0 where all end with 0. A rank notices by itself that another one is gone."""
        living = {self._fork_rank(rank) for rank in range(self._ranks)}
        port, keeps = int(os.environ["MASTER_PORT"]), self._keeps_store
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False) if keeps else None
        failed = False
        while living:
            pid, status = os.wait()
            living.discard(pid)
            failed |= status != 0
        del store
        return int(failed)

    def _fork_rank(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
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
        return Outcome(abs(self._code or 0), "", self.said)

    def _ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.launcher, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def processes(self) -> dict[int, int]:
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.launcher and state not in "ZX":
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
        if self._code is None:
            os.kill(self.launcher, signal.SIGKILL)  # it may not have its session yet
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += pids
            time.sleep(0.01)
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.launcher, 0)[1])
        return killed
