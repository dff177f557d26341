"""Two hosts on one machine: network namespaces joined by a cable (veth), each with a name and disk of its own.

Needs root and iproute2. Everything is named after one random word and taken away by these names.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.launch import Outcome, environment, free_port, wait_until

DEVICE = "tess0"  # the network device in each host
_OWN = ("--uts", "--pid", "--fork", "--kill-child", "--mount-proc")  # name and process ids


@dataclass(frozen=True)
class Host:
    """One of the two: its network namespace, which is also its name, its address, and folders that it does not have."""

    namespace: str
    address: str
    hidden: tuple[Path, ...] = ()

    def start(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        mounts = "".join(f"mount -t tmpfs none '{folder}' && " for folder in self.hidden)
        inside = f"{mounts}hostname {self.namespace} && cd '{cwd}' && exec \"$@\""
        full_env = environment({"GLOO_SOCKET_IFNAME": DEVICE, **env})
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", *_OWN, "sh", "-c", inside, "sh", *command],
                env=full_env,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=60)
        return [int(word) for word in listed.stdout.split()]

    def cut_off(self) -> None:
        """Pull the cable: what is sent is lost, and no end of a connection notices."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", DEVICE, "down"], check=True, timeout=60)

    def power_off(self) -> None:
        """Kill all processes of the host with SIGKILL."""
        for _ in range(50):
            found = self.processes()
            if not found:
                return
            for process in found:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        raise AssertionError(f"{self.namespace}: {found} cannot be killed")


@contextmanager
def two_hosts(hidden: Sequence[tuple[Path, ...]] = ((), ())) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; skips the test where that is not permitted.

    Args:
        hidden: the folders that the first, and the second, host does not have.
    """
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 (apt-get install iproute2)")
    word = secrets.token_hex(3)
    names = [f"tess-{word}-{letter}" for letter in "ab"]
    hosts = [Host(name, f"10.213.0.{n + 1}", tuple(hidden[n])) for n, name in enumerate(names)]
    try:
        for name in names:
            _ip("netns", "add", name)
        cable = (f"t{word}a", f"t{word}b")
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for host, end in zip(hosts, cable, strict=True):
            _ip("link", "set", end, "netns", host.namespace, "name", DEVICE)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("-n", host.namespace, "link", "set", DEVICE, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        probe = hosts[0].start(["true"], cwd=Path("/"), env={}, log=Path("/tmp") / names[0])
        if probe.wait(timeout=60) != 0:
            pytest.skip("needs the right to enter a network namespace and to set a host name")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.power_off()
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60)
        for suffix in (".out", ".err"):
            Path("/tmp", names[0] + suffix).unlink(missing_ok=True)


def _ip(*words: str) -> None:
    """Run a command of iproute2; skip the test where it is refused."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}: network namespaces need root")


def fixed(hosts: Sequence[Host], ranks: Sequence[int]) -> list[list[str]]:
    """Return torchrun's options for a fixed number of hosts."""
    port = free_port()
    meeting = ["--nnodes=2", f"--master-addr={hosts[0].address}", f"--master-port={port}"]
    return [[*meeting, f"--node-rank={number}", f"--nproc-per-node={count}"] for number, count in enumerate(ranks)]


def elastic(hosts: Sequence[Host], ranks: Sequence[int]) -> list[list[str]]:
    """Return torchrun's options for an elastic job that may continue on one host; the rendezvous is on the first."""
    port = free_port()
    meeting = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=tessera"]
    meeting += [f"--rdzv-endpoint={hosts[0].address}:{port}"]
    # Names of these hosts cannot be looked up: say which one the endpoint is, and the addresses.
    conf = ["is_host=1,last_call_timeout=10", "is_host=0,last_call_timeout=10"]
    return [
        [*meeting, f"--rdzv-conf={conf[n]}", f"--local-addr={hosts[n].address}", f"--nproc-per-node={count}"]
        for n, count in enumerate(ranks)
    ]


class Job:
    """torchrun on both hosts, started together; all arguments but `logs` are per host, and rank 0 is on the first."""

    def __init__(
        self,
        hosts: Sequence[Host],
        launch: Sequence[Sequence[str]],
        commands: Sequence[Sequence[str]],
        folders: Sequence[Path],
        envs: Sequence[Mapping[str, str]],
        logs: Path,
    ) -> None:
        self.hosts = hosts
        self._logs = [logs.with_name(f"{logs.name}-{number}") for number in range(len(hosts))]
        self._processes = []
        for number, host in enumerate(hosts):
            command = [sys.executable, "-m", "torch.distributed.run", *launch[number], *commands[number]]
            self._processes.append(host.start(command, cwd=folders[number], env=envs[number], log=self._logs[number]))

    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def until(self, ready: Callable[[], object]) -> None:
        """Wait until `ready` gives something true or the job has ended, at most four minutes."""
        wait_until(lambda: ready() or not self.running(), 240)

    def wait(self, timeout: float) -> list[Outcome]:
        """Both outcomes; after `timeout` seconds a failure, with everything killed."""
        end = time.monotonic() + timeout
        while self.running() and time.monotonic() < end:
            time.sleep(0.1)
        late = self.running()
        for host in self.hosts:
            host.power_off()
        outcomes = [
            Outcome(process.wait(), *(log.with_suffix(suffix).read_text() for suffix in (".out", ".err")))
            for process, log in zip(self._processes, self._logs, strict=True)
        ]
        assert not late, f"more than {timeout} s\n" + "\n".join(outcome.said for outcome in outcomes)
        return outcomes
