"""Runner of hostile cases, each in a process with time and memory limits; deterministic by seed."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from tests.hostile.expect import raw_characters

FOLDER = Path(__file__).parent
_STATED = ("CASES", "FAST_CASES", "TIME_LIMIT_S", "MEMORY")


@dataclass(frozen=True)
class Subject:
    """A module of this folder with a `trial`, which runs one case in an empty folder and returns its kind or raises."""

    name: str
    trial: Callable[[random.Random, Path], str]
    cases: int = 1000
    fast_cases: int = 20  # of the slow suite
    time_limit_s: float = 60
    memory: int = 2 * 2**30  # bytes of address space that a case may add

    @classmethod
    def load(cls, name: str) -> Subject:
        """Import a subject, and let it make what all its cases share (`prepare`)."""
        module = importlib.import_module(f"tests.hostile.{name}")
        getattr(module, "prepare", lambda: None)()
        stated = {key.lower(): getattr(module, key) for key in _STATED if hasattr(module, key)}
        return cls(name, module.trial, **stated)


def subject_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef trial(" in path.read_text())


@dataclass(frozen=True)
class Outcome:
    """How one case ended: its kind, or why it failed, with what was printed."""

    number: int
    kind: str
    failure: str


def run_cases(subject: Subject, seed: int, numbers: Iterable[int], home: Path, jobs: int) -> Iterator[Outcome]:
    """Run these cases below `home`, `jobs` at a time; what they leave behind is removed."""
    waiting, running = list(numbers)[::-1], list[_Case]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Case(subject, seed, waiting.pop(), home))
        wait([case.process.sentinel for case in running], timeout=min(case.seconds_left for case in running))
        for case in [case for case in running if case.is_over]:
            running.remove(case)
            yield case.end()


class _Case:
    def __init__(self, subject: Subject, seed: int, number: int, home: Path) -> None:
        self._number = number
        self._home = home / f"{subject.name}{number}"
        self._home.mkdir()
        self._until = time.monotonic() + subject.time_limit_s
        fork = multiprocessing.get_context("fork")  # the product is imported once, by the parent
        self.process = fork.Process(target=_run, args=(subject, seed, number, self._home))
        self.process.start()

    @property
    def seconds_left(self) -> float:
        return max(self._until - time.monotonic(), 0)

    @property
    def is_over(self) -> bool:
        return not self.process.is_alive() or not self.seconds_left

    def end(self) -> Outcome:
        hangs = self.process.is_alive()
        self.process.kill()  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        printed, kind = (_text(self._home / name) for name in ("printed", "kind"))
        raw = raw_characters(printed, allowed="\n\r\t")
        failure = _text(self._home / "failure")
        if hangs:
            failure = "it hangs"
        elif not failure and self.process.exitcode:
            failure = f"the process ended with {self.process.exitcode}"
        elif not failure and raw:
            failure = f"printed raw {raw}"
        shutil.rmtree(self._home, ignore_errors=True)
        return Outcome(self._number, kind, f"{failure}\n{printed[-3000:]}" if failure else "")


def _run(subject: Subject, seed: int, number: int, home: Path) -> None:
    os.setsid()  # so that whatever it starts can be ended with it
    printed = os.open(home / "printed", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, sys.stdout.fileno())
    os.dup2(printed, sys.stderr.fileno())
    os.environ.update(TESSERA_CACHE=str(home / "cache"), TESSERA_DATASETS=str(home / "datasets"))
    _limit_memory(subject.memory)
    folder = home / "case"
    folder.mkdir()
    try:
        kind = subject.trial(random.Random(f"{seed} {subject.name} {number}"), folder)
    except BaseException:
        (home / "failure").write_text(traceback.format_exc(), errors="backslashreplace")
    else:
        (home / "kind").write_text(kind)


def _limit_memory(more: int) -> None:
    """Let this process take `more` bytes of address space; nothing happens where it cannot be known what it has."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _text(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.is_file() else ""


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
