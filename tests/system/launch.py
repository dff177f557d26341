"""Real jobs for tests: a command in a process group of its own, ended by its id when its time is up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Everything it printed, for the message of a failed assertion."""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def forget_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take from the environment what a user's shell has not; with some of it libraries behave better."""
    names = ("MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "ORT_DISABLE_TELEMETRY", "CI", "PYTEST_CURRENT_TEST")
    for name in names:
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_command(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300, cwd: Path = ROOT
) -> Outcome:
    """Run to the end, or fail after `timeout` seconds with the whole process group gone."""
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=full_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} took more than {timeout} s\n{out}\n{err}") from None
    return Outcome(process.returncode, out, err)


def run_python(
    script: Path | str, *args: str, env: Mapping[str, str] | None = None, timeout: float = 300, cwd: Path = ROOT
) -> Outcome:
    """One plain process."""
    return run_command([sys.executable, str(script), *args], env=env, timeout=timeout, cwd=cwd)


def torchrun(
    script: Path | str,
    *args: str,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    cwd: Path = ROOT,
) -> Outcome:
    """One node with `ranks` processes, on loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(script), *args]
    return run_command(command, env=env, timeout=timeout, cwd=cwd)
