"""Command lines and environments for tests, and functions that run a command to its end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
PART_FAILED = "the run continues without it"  # of a warning


@dataclass(frozen=True)
class Outcome:
    """End of a command; `printed` is what all commands since the test before have printed (tests/conftest.py)."""

    printed: ClassVar[list[str]] = []

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        self.printed.extend([self.out, self.err])

    @property
    def said(self) -> str:
        """Exit code, stdout and stderr, for the message of a failed assertion."""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


Command = Callable[..., Outcome]  # of a script's main and its arguments


def forget_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables from the environment that a user's shell has not and libraries react to."""
    names = ("MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "ORT_DISABLE_TELEMETRY", "CI", "PYTEST_CURRENT_TEST")
    for name in names:
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    """Return a free port below those of outgoing connections, which would take it before the job listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a command: those of the tests, one thread per process, and `env`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}


def python_command(script: Path | str, *args: str) -> list[str]:
    return [sys.executable, str(script), *args]


def torchrun_command(
    script: Path | str, *args: str, ranks: int = 2, options: Sequence[str] = (), port: int = 0
) -> list[str]:
    """Return the command line of one node with `ranks` processes, on loopback; with a free port where none is given."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]
    return [*command, "--master-addr=127.0.0.1", f"--master-port={port or free_port()}", str(script), *args]


def wait_until(ready: Callable[[], object], timeout: float, said: Callable[[], str] = str) -> None:
    """Wait until `ready` returns something true; after `timeout` seconds fail with the text that `said` returns."""
    end = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < end, f"the test's moment has not come in {timeout} s\n{said()}"
        time.sleep(0.02)


def run_command(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300, cwd: Path = ROOT
) -> Outcome:
    """Run to the end, or fail after `timeout` seconds with the whole process group gone."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=cwd, env=environment(env), start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} took more than {timeout} s\n{out}\n{err}") from None
    return Outcome(process.returncode, out, err)


def run_python(script: Path | str, *args: str, **how: Any) -> Outcome:
    return run_command(python_command(script, *args), **how)


def torchrun(script: Path | str, *args: str, ranks: int = 2, **how: Any) -> Outcome:
    return run_command(torchrun_command(script, *args, ranks=ranks), **how)
