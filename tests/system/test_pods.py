"""Two Kubernetes pods on two hosts: Kubeflow's variables, the same bare command, and restarts.

A pod is a network namespace with the variables of Kubeflow's torch policy and one bare torchrun, always with the same
command. A strike is SIGKILL of all its processes, or SIGTERM to its first one and, after the grace period, SIGKILL. It
is recreated as by a TrainJob, whose operator ends the other pod too and starts both, or as by a plain Job, which starts
each pod again when it has ended. Moments are drawn by progress: some optimizer steps after the last strike, and a
fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tessera.utils.checkpoints.format import load_checkpoint
from tests.system.hosts import Host, two_hosts
from tests.system.launch import Outcome, free_port, wait_until
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data

STEPS = 12  # optimizer steps of a run: two epochs of six
STRIKES, SEED = 2, 4
GRACE_S, LIMIT_S = 60.0, 240.0
TRAIN = ("--batch", "12", "--epochs", "2", "--sync-bn", "--amp", "off", "--save-steps", "1")
LIMITS = {"TESSERA_PEER_TIMEOUT": "15", "TESSERA_JOIN_TIMEOUT": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}


class Pod:
    """One node of the training; `folder` is the disk that both pods see, `log` begins the names of its logs."""

    def __init__(
        self, host: Host, number: int, command: Sequence[str], folder: Path, env: Mapping[str, str], log: Path
    ) -> None:
        self._host, self._command, self._folder = host, command, folder
        self._cache, self._log = folder / f"cache{number}", log.with_name(f"{log.name}-pod{number}")
        self._env = {**env, "TESSERA_CACHE": str(self._cache), "PET_NODE_RANK": str(number)}
        self.starts = 0
        self.create()

    def create(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)
        self.starts += 1
        self._process = self._host.start(self._command, cwd=self._folder, env=self._env, log=self._log)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def outcome(self) -> Outcome:
        said = (self._log.with_suffix(suffix).read_text(errors="replace") for suffix in (".out", ".err"))
        return Outcome(-1 if self.code is None else self.code, *said)

    def kill(self) -> None:
        self._host.power_off()
        self._process.wait()

    def terminate(self) -> None:
        """As the kubelet does: SIGTERM to the first process, SIGKILL of what is left after the grace period."""
        parent = self._process.pid
        with contextlib.suppress(OSError, IndexError):  # it has ended by itself
            first = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
            os.kill(first, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self.kill()


class Training:
    """A training on two pods; what it writes lies in `folder`, beside the dataset."""

    def __init__(self, hosts: Sequence[Host], folder: Path, name: str, limits: Mapping[str, str]) -> None:
        policy = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": hosts[0].address}
        env = {**policy, "PET_MASTER_PORT": str(free_port()), **limits}
        args = flags(folder / "tiny.yaml", Path("runs"), *TRAIN, "--resume", "auto", "--name", name)
        command = [sys.executable, "-m", "torch.distributed.run", "-m", "tessera", "train", *args]
        self.run = folder / "runs" / name
        self.last = self.run / "weights" / "last.pt"
        self.pods = [Pod(host, number, command, folder, env, folder / name) for number, host in enumerate(hosts)]

    def step(self) -> int:
        return int(load_checkpoint(self.last)["step"]) if self.last.is_file() else 0

    def until(self, step: int) -> bool:
        """Wait until so many steps are saved and both pods have joined; whether it came before the run's end."""
        wait_until(lambda: self._tended() or (self._joined() and self.step() >= step), LIMIT_S, self.said)
        return self.pods[0].code != 0

    def finish(self) -> None:
        """Wait for the end of both; where the first one is done, the other may have been too late to be let in."""
        wait_until(self._tended, LIMIT_S, self.said)
        for pod in self.pods:
            pod.kill()

    def strike(self, number: int, by: signal.Signals, together: bool) -> None:
        struck, other = self.pods[number], self.pods[1 - number]
        struck.kill() if by == signal.SIGKILL else struck.terminate()
        if together:
            other.terminate()
            other.create()
        struck.create()

    def said(self) -> str:
        return "\n".join(pod.outcome.said[-6000:] for pod in self.pods)

    def _joined(self) -> bool:
        return "2 ranks (1 on " in self.pods[0].outcome.err

    def _tended(self) -> bool:
        """Recreate what has failed; whether the run has ended."""
        if self.pods[0].code != 0:
            for pod in self.pods:
                if pod.code:
                    pod.create()
        return self.pods[0].code == 0


@pytest.mark.slow
def test_pods_that_are_ended_and_recreated_end_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    dice, strikes, runs = random.Random(SEED), 0, 0
    make_data(tmp_path, train=12 * STEPS // 2, val=6)
    with two_hosts() as hosts:
        undisturbed = Training(hosts, tmp_path, "undisturbed", {})  # no strike has to be noticed soon
        undisturbed.finish()
        assert [pod.starts for pod in undisturbed.pods] == [1, 1] and undisturbed.step() == STEPS, undisturbed.said()
        assert "2 ranks (1 on tess-" in undisturbed.pods[0].outcome.err, undisturbed.said()
        while strikes < STRIKES:
            training, step = Training(hosts, tmp_path, f"struck{runs}", LIMITS), dice.randint(0, 3)
            while strikes < STRIKES and step < STEPS and training.until(step):
                time.sleep(dice.uniform(0, 0.4))
                number, by = dice.choice((0, 1)), dice.choice((signal.SIGKILL, signal.SIGTERM))
                together = dice.random() < 0.5
                training.strike(number, by, together)
                print(f"after step {step}: {by.name} of pod {number}, {'both' if together else 'each'} recreated")
                strikes, step = strikes + 1, training.step() + dice.randint(0, 4)
            training.finish()
            runs += 1
            assert_same_checkpoint(training.last, undisturbed.last)
            assert losses(training.run).equals(losses(undisturbed.run))
