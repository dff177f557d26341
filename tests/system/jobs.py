"""Background jobs for tests that disturb them; all their processes are killed at the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.system.launch import ROOT, Outcome, environment, free_port, python_command, torchrun_command


class Job(AbstractContextManager["Job"]):
    """A command in the background, with all of its descendants; a context manager that kills them all.

    They are found by a mark in their environment, which children inherit: a launcher puts its ranks into sessions of
    their own. What it prints goes to files in `folder`.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: int | None = None,
    ) -> None:
        self.mark = f"TESSERA_TEST_JOB={uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / f"out{uuid.uuid4().hex[:6]}", folder / f"err{uuid.uuid4().hex[:6]}"
        name, value = self.mark.split("=")
        full_env = {**environment(env), name: value}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=full_env, stdin=stdin, stdout=out, stderr=err, start_new_session=True
            )

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Return the ids of all living processes of this job, the launcher among them."""
        return sorted(pid for pid in _living() if self.mark.encode() in read_proc(pid, "environ").split(b"\0"))

    def rank(self, number: int) -> int:
        for pid in self.processes():
            variables = read_proc(pid, "environ").split(b"\0")
            if f"RANK={number}".encode() in variables and parent_of(pid) == self.process.pid:
                return pid
        raise AssertionError(f"rank {number} is not there\n{self.said}")

    def children(self, parent: int) -> list[int]:
        return [pid for pid in self.processes() if parent_of(pid) == parent]

    def wait(self, timeout: float = 300) -> Outcome:
        """Wait for the command to end; after `timeout` seconds the test fails, with the job killed."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.tell_where()
            self.kill()
            raise AssertionError(f"the job is not over after {timeout} s\n{self.said}") from None
        return Outcome(self.process.returncode, self.out, self.err)

    def until(self, ready: Callable[[], object], timeout: float = 300) -> None:
        """Wait until `ready` gives something true, while the job runs."""
        end = time.monotonic() + timeout
        while not ready():
            assert self.process.poll() is None, f"ended before the test's moment came\n{self.said}"
            if time.monotonic() > end:
                self.tell_where()
                raise AssertionError(f"the test's moment has not come in {timeout} s\n{self.said}")
            time.sleep(0.02)

    def tell_where(self) -> None:
        """Let the ranks and their loader workers print the stack of each of their threads."""
        tell_where(self.processes())

    def left_over(self, within_s: float = 60) -> list[str]:
        """Return the command lines of the processes left after `within_s` seconds; [] as soon as there is none."""
        end = time.monotonic() + within_s
        while (pids := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return [read_proc(pid, "cmdline").replace(b"\0", b" ").decode() for pid in pids]

    def kill(self) -> list[int]:
        killed: list[int] = []
        while pids := self.processes():  # again, for those that were being started
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += pids
            time.sleep(0.02)
        self.process.wait()
        return killed

    @property
    def said(self) -> str:
        return f"exit code {self.process.poll()}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-16000:]}"


@contextmanager
def started(
    folder: Path, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: Path = ROOT
) -> Iterator[list[Job]]:
    """Start ranks without a launcher: concurrent jobs, each with its own variables."""
    with ExitStack() as stack:
        places = [folder / f"said{number}" for number in range(len(commands))]
        yield [stack.enter_context(Job(*one, cwd=cwd)) for one in zip(commands, places, envs, strict=True)]


def slurm_variables(ranks: int = 2) -> list[dict[str, str]]:
    """Return the variables that srun sets for each task of a job on one node, with an address for the rendezvous."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**place, "SLURM_NTASKS": str(ranks), "SLURM_STEP_ID": "0"}
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]


def start(
    folder: Path,
    ranks: int,
    *args: str,
    fault: str = "",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Job:
    """Start train.py in the background, on one or more ranks; with a fault of fault_program.py where one is given."""
    program = ROOT / "tests" / "system" / "fault_program.py" if fault or env else ROOT / "train.py"
    if ranks > 1 or options:
        command = torchrun_command(program, *args, ranks=ranks, options=options)
    else:
        command = python_command(program, *args)
    return Job(command, folder / "said", {**(env or {}), "FAULT": fault})


def train(folder: Path, ranks: int, *args: str, timeout: float = 300, **started: Any) -> Outcome:
    """Run train.py, as `start` does, to its end; no process of it and nothing new in /dev/shm may be left."""
    before = shared_memory()
    with start(folder, ranks, *args, **started) as job:
        outcome = job.wait(timeout)
        assert job.left_over() == [], outcome.said
    assert_no_shared_memory_but(before)
    return outcome


def assert_no_shared_memory_but(before: set[str]) -> None:
    """Assert that /dev/shm holds nothing new."""
    end = time.monotonic() + 60
    while (new := shared_memory() - before) and time.monotonic() < end:  # of locks that other jobs make and unlink
        time.sleep(0.05)
    assert not new, new


def shared_memory() -> set[str]:
    """Return the names in /dev/shm without the id of a living process."""
    living = set(map(str, _living()))
    return {path.name for path in Path("/dev/shm").iterdir() if not living & set(re.findall(r"\d+", path.name))}


def tell_where(pids: Iterable[int]) -> None:
    """Let the processes that handle SIGUSR2 print the stack of each of their threads."""
    for pid in pids:
        if _answers(pid, signal.SIGUSR2):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)  # one after the other, each heading its own lines


def _living() -> list[int]:
    """Return all processes; a zombie has an empty environment, and so no mark."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def parent_of(pid: int) -> int:
    found = re.search(rb"\nPPid:\t(\d+)", read_proc(pid, "status"))
    return int(found[1]) if found else 0


def _answers(pid: int, number: int) -> bool:
    """Return whether a process has its own handler for a signal."""
    found = re.search(rb"\nSigCgt:\t([0-9a-f]+)", read_proc(pid, "status"))
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def read_proc(pid: int, what: str) -> bytes:
    """Return a file of a process in /proc; b"" where the process has ended."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""
