"""deploy/ray_train.py on a cluster of two Ray nodes, each a host of its own: actors and drivers that are lost."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.system.hosts import DEVICE, Host, two_hosts
from tests.system.jobs import Job, parent_of, read_proc, train
from tests.system.launch import ROOT, Outcome, wait_until
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data

pytest.importorskip("ray", reason="needs the group slow (uv sync --group dev --group slow), on Linux")
pytestmark = pytest.mark.slow

PROGRAM = ROOT / "deploy" / "ray_train.py"
EPOCHS, STEPS = 8, 5
PORT = 6379


@dataclass(frozen=True)
class Cluster:
    """Two Ray nodes, with a CPU each.

    Attributes:
        variables: lead a driver on the first host to them.
    """

    hosts: tuple[Host, Host]
    variables: dict[str, str]

    def driver(self, folder: Path, *args: str) -> Job:
        """deploy/ray_train.py on the first host, in the background, where Ray sees the processes of its node."""
        command = ["ip", "netns", "exec", self.hosts[0].namespace, sys.executable, str(PROGRAM), "--nodes", "2", *args]
        return Job(command, folder / "said", self.variables)

    def run(self, folder: Path, *args: str) -> Outcome:
        with self.driver(folder, *args) as job:
            return self.end_of(job)

    def end_of(self, job: Job) -> Outcome:
        """How a driver ends, after which no process of its training may be left."""
        outcome = job.wait(600)
        wait_until(lambda: not self.ranks(), 60, lambda: f"{self.ranks()} are left\n{outcome.said}")
        return outcome

    def actors(self, number: int) -> list[int]:
        """The process that has started that number's torchrun, on either host; none before that."""
        words = f"--node-rank={number}".encode()
        started = [pid for pid in self.processes() if words in read_proc(pid, "cmdline").split(b"\0")]
        # A process that torchrun starts has its command line at first.
        return [pid for pid in map(parent_of, started) if pid and pid not in started]

    def kill_actor(self, number: int, job: Job, ready: Callable[[], object]) -> None:
        """kill -9 of it once `ready` gives something true, while the job runs."""
        job.until(lambda: self.actors(number))
        (actor,) = self.actors(number)
        job.until(ready)
        os.kill(actor, signal.SIGKILL)

    def processes(self) -> list[int]:
        return [pid for host in self.hosts for pid in host.processes()]

    def ranks(self) -> list[int]:
        return [pid for pid in self.processes() if b"RAY_TRAIN_RUN=" in read_proc(pid, "environ")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("ray")
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="r") as folder:  # sockets in it need a short path
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # Ray's own would let all other tests of the machine go first
            "TESSERA_CACHE": str(logs / "cache"),
        }
        head = f"{hosts[0].address}:{PORT}"
        roles = (
            ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"],
            [f"--address={head}"],
        )
        for number, (host, role) in enumerate(zip(hosts, roles, strict=True)):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role]
            command += [f"--node-ip-address={host.address}", "--num-cpus=1", "--object-store-memory=100000000"]
            # A process finds the node that it is on by the address that it would reach the world from.
            subprocess.run(
                ["ip", "-n", host.namespace, "route", "add", "default", "dev", DEVICE], check=True, timeout=60
            )
            log = logs / f"node{number}"
            host.start(command, cwd=logs, env=quiet, log=log)
            out, err = log.with_suffix(".out"), log.with_suffix(".err")
            wait_until(lambda out=out: "Ray runtime started" in out.read_text(), 240, err.read_text)
        yield Cluster(hosts, {**quiet, "RAY_ADDRESS": head})
        for host in hosts:
            host.power_off()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=8 * STEPS, val=4)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(folder, 2, *flags(data, folder, "--epochs", str(EPOCHS)))
    assert outcome.code == 0, outcome.said
    return folder / "exp"


def has_first_row(run: Path) -> bool:
    """Whether epoch 0 is in results.csv."""
    return (run / "results.csv").is_file() and "\n0," in (run / "results.csv").read_text()


def places(words: str, said: str) -> list[tuple[int, int]]:
    return [(int(epoch), int(batch)) for epoch, batch in re.findall(rf"{words} epoch (\d+) after batch (\d+)", said)]


def assert_same_run(run: Path, whole: Path) -> None:
    assert_same_checkpoint(run / "weights" / "last.pt", whole / "weights" / "last.pt")
    assert losses(run).equals(losses(whole))


def test_the_job_starts_again_without_an_actor_and_resumes_to_the_same_bits(
    cluster: Cluster, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "night"
    with cluster.driver(tmp_path, *flags(data, tmp_path, "--epochs", str(EPOCHS), "--name", "night")) as job:
        cluster.kill_actor(1, job, lambda: has_first_row(run))
        outcome = cluster.end_of(job)
    assert outcome.code == 0, outcome.said
    assert outcome.out.count("night; starting the run") == 1, outcome.said
    assert re.findall(r"Restart .*", outcome.out) == [
        "Restart 1 of 3: the nodes ended with [1, -1], where -1 is a lost one"
    ]
    # torchrun of the lost actor got SIGTERM: one rank's signal stops all of them, with a checkpoint.
    (resumed,) = places("Resuming .* in", outcome.out)
    assert resumed >= (1, 0) and "Stopped as requested" in outcome.out, outcome.said
    assert_same_run(run, undisturbed)
    result = json.loads(outcome.out.splitlines()[-1])
    best = torch.load(run / "weights" / "best.pt", weights_only=True)
    expected = {"weights": str(run / "weights" / "best.pt"), "epoch": best["epoch"], "metrics": best["metrics"]}
    assert result == expected and 0 < result["metrics"]["map"] < 1


def test_the_driver_ends_everything_with_a_checkpoint_and_says_when_restarts_are_used_up(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "night"
    last, table = run / "weights" / "last.pt", run / "results.csv"
    args = [*flags(data, tmp_path, "--epochs", "1000", "--name", "night"), "--max-restarts", "0"]
    with cluster.driver(tmp_path, *args) as job:
        job.until(lambda: has_first_row(run))
        moment = time.time_ns()
        job.process.kill()
        killed = cluster.end_of(job)
    assert killed.code == -signal.SIGKILL and last.stat().st_mtime_ns > moment, killed.said
    state = torch.load(last, weights_only=True)

    with cluster.driver(tmp_path, *args) as job:
        rows = len(table.read_text().splitlines())
        # What an actor has read and not yet handed on is lost with it.
        job.until(lambda: places("Resuming .* in", job.out))
        cluster.kill_actor(0, job, lambda: len(table.read_text().splitlines()) > rows)
        lost = cluster.end_of(job)
    assert places("Resuming .* in", lost.out) == [(state["epoch"], state["step_in_epoch"])], lost.said
    assert lost.code == 1 and lost.out.count("Waiting for 2 nodes") == 1 and "Restart" not in lost.out, lost.said
    assert re.search(r"error: the nodes ended with \[-1, \d+\].* --max-restarts 0 is used up", lost.err), lost.said

    with cluster.driver(tmp_path, *args) as job:
        rows = len(table.read_text().splitlines())
        job.until(lambda: len(table.read_text().splitlines()) > rows)
        job.process.send_signal(signal.SIGTERM)
        stopped = cluster.end_of(job)
    assert stopped.code == 128 + signal.SIGTERM and "Stopped as requested" in stopped.out, stopped.said
    assert "Restart" not in stopped.out and "Traceback" not in stopped.err, stopped.said


def test_a_process_that_outlives_its_command_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    program = importlib.import_module(PROGRAM.stem)
    monkeypatch.setattr(program, "SHUTDOWN_S", -20)
    node = program.Node.__ray_metadata__.modified_class(str(tmp_path / "night"))
    begin_another = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"  # which has the same output
    node.start(["-c", begin_another], str(tmp_path))
    printed, code = b"", None
    while code is None:
        more, code = node.poll()
        printed += more
    assert code == 0
    assert node.left_over(kill=False) == [printed.decode().strip()]
    assert node.left_over(kill=True) == []


def test_a_mistake_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    data = make_data(tmp_path, train=4, val=2)
    next((tmp_path / "shapes" / "labels" / "train").glob("*.txt")).write_text("99 0.5 0.5 0.1 0.1\n")
    outcome = cluster.run(tmp_path, *flags(data, tmp_path / "runs", "--name", "night"))
    assert outcome.code == 1 and "Not restarted." in outcome.err and "class 99" in outcome.out, outcome.said
    assert outcome.out.count("Waiting for 2 nodes") == 1 and "Restart" not in outcome.out, outcome.said
    assert not (tmp_path / "runs").exists()
