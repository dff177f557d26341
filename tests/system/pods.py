"""Two pods of one training, killed and recreated: each on a host of its own, as the manifests of deploy/kubernetes do.

    python -m tests.system.pods --kills 20      # and how many runs ended with the bits of an undisturbed one

A pod is a network namespace with the variables of Kubeflow's torch policy and one bare torchrun, always with the same
command. A strike is SIGKILL of all its processes, or SIGTERM to its first one and, after the grace period, SIGKILL. It
is recreated as by a TrainJob, whose operator ends the other pod too and starts both, or as by a plain Job, which starts
each pod again when it has ended. Moments are drawn by progress: some optimizer steps after the last strike, and a
fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.utils.checkpoints.format import load_checkpoint
from tests.system.hosts import Host, two_hosts
from tests.system.launch import Outcome, free_port, wait_until
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data

STEPS = 12  # optimizer steps of a run: two epochs of six
_GRACE_S = 60.0
_LIMIT_S = 240.0
TRAIN = ("--batch", "12", "--epochs", "2", "--sync-bn", "--amp", "off", "--save-steps", "1")
_LIMITS = {"TESSERA_PEER_TIMEOUT": "15", "TESSERA_JOIN_TIMEOUT": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}


@dataclass
class Pod:
    """One node of the training.

    Attributes:
        host: where it runs.
        number: of the node.
        command: the same for every start.
        folder: the disk that both pods see; its own files are beside it.
        env: variables that it gets.
        log: begin of the names of the files that get what it prints.
        starts: how often it was created.
    """

    host: Host
    number: int
    command: Sequence[str]
    folder: Path
    env: Mapping[str, str]
    log: Path
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def create(self) -> None:
        """Start it, with an empty cache of its own."""
        cache = self.folder / f"cache{self.number}"
        shutil.rmtree(cache, ignore_errors=True)
        self.starts += 1
        env = {**self.env, "TESSERA_CACHE": str(cache), "PET_NODE_RANK": str(self.number)}
        self._process = self.host.start(self.command, cwd=self.folder, env=env, log=self._log)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def outcome(self) -> Outcome:
        """What it has printed since its last start."""
        said = (self._log.with_suffix(suffix).read_text(errors="replace") for suffix in (".out", ".err"))
        return Outcome(-1 if self.code is None else self.code, *said)

    def kill(self) -> None:
        """SIGKILL of all that runs there, as when its node is gone."""
        assert self._process is not None
        self.host.power_off()
        self._process.wait()

    def terminate(self) -> None:
        """As the kubelet does: SIGTERM to the first process, SIGKILL of what is left after the grace period."""
        assert self._process is not None
        parent = self._process.pid
        with contextlib.suppress(OSError, IndexError):  # it has ended by itself
            first = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
            os.kill(first, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()

    @property
    def _log(self) -> Path:
        return self.log.with_name(f"{self.log.name}-pod{self.number}-{self.starts}")


class Training:
    """A training on two pods; what it writes lies in `folder`.

    Args:
        hosts: of the pods.
        folder: with the dataset, as `make_data` draws it.
        name: of the run.
        limits: variables, how long it waits for whom.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, name: str, limits: Mapping[str, str]) -> None:
        policy = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": hosts[0].address}
        env = {**policy, "PET_MASTER_PORT": str(free_port()), **limits}
        args = flags(folder / "tiny.yaml", Path("runs"), *TRAIN, "--resume", "auto", "--name", name)
        command = [sys.executable, "-m", "torch.distributed.run", "-m", "tessera", "train", *args]
        self.run = folder / "runs" / name
        self.last = self.run / "weights" / "last.pt"
        (folder / "logs").mkdir(exist_ok=True)
        self.pods = [
            Pod(host, number, command, folder, env, folder / "logs" / name) for number, host in enumerate(hosts)
        ]
        for pod in self.pods:
            pod.create()

    def step(self) -> int:
        """Optimizer steps that are saved."""
        return int(load_checkpoint(self.last)["step"]) if self.last.is_file() else 0

    def until(self, step: int) -> bool:
        """Wait until so many steps are saved and both pods have joined; whether it came before the run's end."""
        wait_until(lambda: self._tended() or (self._joined() and self.step() >= step), _LIMIT_S, self.said)
        return not self._ended()

    def finish(self) -> None:
        """Wait for the end of both; where the first one is done, the other may have been too late to be let in."""
        wait_until(self._tended, _LIMIT_S, self.said)
        for pod in self.pods:
            pod.kill()

    def strike(self, number: int, by: signal.Signals, together: bool) -> None:
        """End a pod, and recreate it, or both of them together."""
        struck, other = self.pods[number], self.pods[1 - number]
        struck.kill() if by == signal.SIGKILL else struck.terminate()
        if together:
            other.terminate()
            other.create()
        struck.create()

    def said(self) -> str:
        """What both have printed last."""
        return "\n".join(f"pod {pod.number}, start {pod.starts}: {pod.outcome.said[-6000:]}" for pod in self.pods)

    def _joined(self) -> bool:
        return "2 ranks (1 on " in self.pods[0].outcome.err

    def _ended(self) -> bool:
        return self.pods[0].code == 0

    def _tended(self) -> bool:
        """Recreate what has failed; whether the run has ended."""
        if not self._ended():
            for pod in self.pods:
                if pod.code:
                    pod.create()
        return self._ended()


@dataclass
class Strikes:
    """What became of the strikes.

    Attributes:
        kinds: strikes of each kind.
        runs: that came to their end.
        equal: those of them with the bits of the undisturbed one.
        starts: of pods.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    equal: int = 0
    starts: int = 0


def campaign(hosts: Sequence[Host], folder: Path, kills: int, seed: int, undisturbed: Training) -> Strikes:
    """Run trainings to their end, with so many strikes in all, and compare each with the undisturbed one.

    Raises:
        AssertionError: a training hangs.
    """
    dice, strikes = random.Random(seed), Strikes()
    while sum(strikes.kinds.values()) < kills:
        training = Training(hosts, folder, f"struck{strikes.runs}", _LIMITS)
        step = dice.randint(0, 3)
        while sum(strikes.kinds.values()) < kills and step < STEPS and training.until(step):
            time.sleep(dice.uniform(0, 0.4))
            number, by = dice.choice((0, 1)), dice.choice((signal.SIGKILL, signal.SIGTERM))
            together = dice.random() < 0.5
            training.strike(number, by, together)
            kind = f"{by.name} of pod {number}, {'both' if together else 'each'} recreated"
            strikes.kinds[kind] += 1
            print(f"{sum(strikes.kinds.values())}: after step {step}: {kind}", flush=True)
            step = training.step() + dice.randint(0, 4)
        training.finish()
        strikes.runs += 1
        try:
            assert_same_checkpoint(training.last, undisturbed.last)
            assert losses(training.run).equals(losses(undisturbed.run)), "other losses"
            strikes.equal += 1
        except AssertionError as error:
            print(f"{training.run.name} ended otherwise than the undisturbed run: {error}", flush=True)
        strikes.starts += sum(pod.starts for pod in training.pods)
    return strikes


def begun(hosts: Sequence[Host], folder: Path) -> Training:
    """The data, and a run that nobody disturbs, to its end."""
    make_data(folder, train=12 * STEPS // 2, val=6)
    undisturbed = Training(hosts, folder, "undisturbed", {})  # no strike has to be noticed soon
    undisturbed.finish()
    assert [pod.starts for pod in undisturbed.pods] == [1, 1] and undisturbed.step() == STEPS, undisturbed.said()
    return undisturbed


def main() -> None:
    """The command line; ends with 1 where a run has other bits."""
    parser = argparse.ArgumentParser(description="Kill pods of a training and see whether it ends as it should.")
    parser.add_argument("--kills", type=int, default=20, help="strikes in all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        strikes = campaign(hosts, Path(folder), asked.kills, asked.seed, begun(hosts, Path(folder)))
    print("\n".join(f"{count:4} {kind}" for kind, count in sorted(strikes.kinds.items())))
    print(f"{asked.kills} strikes, {strikes.starts} starts of pods")
    print(f"{strikes.equal} of {strikes.runs} runs with equal bits")
    print(f"{(time.monotonic() - started) / 60:.1f} minutes, seed {asked.seed}")
    sys.exit(strikes.equal < strikes.runs)


if __name__ == "__main__":
    main()
