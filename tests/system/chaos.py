"""A fault campaign: runs of two ranks killed at random moments of their whole life, each followed by a resume.

    make chaos            # 100 kills, and a table of what became of them
    make chaos KILLS=10

Every kill strikes all processes of the job at once with SIGKILL: launcher, ranks and loader workers. Half of a short
run under torchrun is Python importing modules, which no kill can harm: so the ranks are forked here from a process that
has them, and join as torchrun's do. With --torchrun it is torchrun that starts them. Then the same
command is given again, with --resume where there is a checkpoint, until a run comes to its end; that one must have the
weights of a run that nobody disturbed, bit for bit, and the next one begins. Moments are drawn uniformly from the time
that an undisturbed run takes; every eighth is one of the first 50 ms of the scan, which chance would hardly meet. After
every fourth the run is let go on to its end: a kill would put an end to one that hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.system.jobs import Job, shared_memory, tell_where, torchrun_command
from tests.system.launch import Outcome, free_port
from tests.system.tiny import assert_same_checkpoint, flags, make_data
from utils.checkpoints.format import load_checkpoint
from utils.errors import UserError
from utils.ranks.world import World

PHASES = ("start", "scan", "step", "validation", "save", "end")
_PHASE_OF = {  # by the first word of what a rank says it does
    "reading": "scan",
    "building": "start",
    "training": "step",
    "validating": "validation",
    "saving": "save",
    "measuring": "end",
}
_HANG_S = 180.0
_SCAN_EVERY, _SCAN_S = 8, 0.05
_SPARE_EVERY = 4


@dataclass
class Tally:
    """What became of the kills so far."""

    phases: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    fresh: int = 0
    not_resumed: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    hangs: int = 0
    processes: int = 0
    segments: set[str] = field(default_factory=set)
    temporary: int = 0
    finished: int = 0
    equal: int = 0

    @property
    def kills(self) -> int:
        """How many there were."""
        return sum(self.phases.values())

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        wrong = (self.not_resumed, self.corrupt, self.hangs, self.processes, self.segments, self.temporary)
        return not any(wrong) and self.equal == self.finished > 0

    def table(self) -> str:
        """For the terminal."""
        rows = [("kills", self.kills), *((f"  in {phase}", self.phases[phase]) for phase in PHASES)]
        rows += [("went on from a checkpoint", self.resumed), ("nothing saved yet: began anew", self.fresh)]
        rows += [("did not go on", len(self.not_resumed)), ("corrupt checkpoints", len(self.corrupt))]
        rows += [("hangs", self.hangs), ("left-over processes", self.processes)]
        rows += [("left-over segments in /dev/shm", len(self.segments))]
        rows += [("temporary files in finished runs", self.temporary)]
        rows += [("runs finished", self.finished), ("  with the undisturbed run's bits", self.equal)]
        return "\n".join(f"{name:<36}{value:>6}" for name, value in rows)


class Campaign:
    """Runs, kills and checks; everything it writes lies in `folder`.

    Args:
        folder: for data, caches and runs.
        seed: of the moments.
        torchrun: let it start the ranks.
    """

    def __init__(self, folder: Path, seed: int, torchrun: bool) -> None:
        self._folder, self._random, self._torchrun = folder, random.Random(seed), torchrun
        self._data = make_data(folder)
        self._project = folder / "runs"
        self._phase = folder / "phase"
        self._last = self._project / "exp" / "weights" / "last.pt"
        self._env = {"TESSERA_CACHE": str(folder / "cache"), "CHAOS_PHASE": str(self._phase)}
        self.tally = Tally()
        started = time.monotonic()
        with self._start() as job:
            outcome = job.wait(_HANG_S)
        assert outcome.code == 0, outcome.said
        self.life_s = time.monotonic() - started
        self._expected = folder / "undisturbed.pt"
        self._last.replace(self._expected)
        shutil.rmtree(self._project)

    def strike(self) -> None:
        """Start or go on, and kill at a random moment; a run that ends before is compared, and the next one begins."""
        moment = self._random.uniform(0, self.life_s)
        going_on = self._last.is_file()
        saved = self._whole_step()
        before = shared_memory()
        at_scan = self.tally.kills % _SCAN_EVERY == _SCAN_EVERY - 1
        if at_scan:
            shutil.rmtree(self._folder / "cache", ignore_errors=True)
        with self._start() as job:
            if at_scan:
                self._await_scan(job)
                moment = self._random.uniform(0, _SCAN_S)
            with contextlib.suppress(AssertionError):  # it goes on, and is to be killed
                outcome = job.wait(moment, kill=False)
                self._close_run(outcome)
                return
            phase = self._phase.read_text() if self._phase.is_file() else "start"
            killed = job.kill()
        self.tally.phases[phase] += 1
        self.tally.processes += len(job.left_over(0))
        ids = set(map(str, killed))
        self.tally.segments |= {n for n in shared_memory() - before if ids & set(n.replace("-", "_").split("_"))}
        step = self._whole_step()
        if step < saved:
            self.tally.corrupt.append(f"step {saved} before the kill in {phase}, {step} after it")
        self.tally.resumed += going_on
        self.tally.fresh += not going_on

    def finish(self) -> None:
        """Let the run that was killed last, or a new one, go on to its end."""
        with self._start() as job:
            try:
                outcome = job.wait(_HANG_S)
            except AssertionError as error:
                self.tally.hangs += 1
                print(error, file=sys.stderr)
                return
        self._close_run(outcome)

    def _await_scan(self, job: Job | ForkedJob) -> None:
        end = time.monotonic() + _HANG_S
        while not (self._phase.is_file() and self._phase.read_text() == "scan"):
            assert time.monotonic() < end and job.processes(), "the scan never came"
            time.sleep(0.001)

    def _start(self) -> Job | ForkedJob:
        self._phase.unlink(missing_ok=True)
        if self._last.is_file():
            args = ["--resume", str(self._last), "--device", "cpu"]
        else:
            args = flags(self._data, self._project, "--epochs", "2", "--save-steps", "1", "--exist-ok")
        if self._torchrun:
            return Job(torchrun_command(Path(__file__), "--rank", *args), self._folder / "said", self._env)
        return ForkedJob(args, self._folder / "said", self._env)

    def _whole_step(self) -> int:
        """Step of the checkpoint; -1 where there is none. A damaged one is noted."""
        if not self._last.is_file():
            return -1
        try:
            return int(load_checkpoint(self._last)["step"])
        except UserError as error:
            self.tally.corrupt.append(str(error))
            return -1

    def _close_run(self, outcome: Outcome) -> None:
        killed_at_the_end = "nothing is left to train" in outcome.err
        if outcome.code != 0 and not killed_at_the_end:
            self.tally.not_resumed.append(outcome.said)
            print(outcome.said, file=sys.stderr)
        else:
            self.tally.finished += 1
            self.tally.temporary += len(list(self._project.rglob("*.tmp")))
            try:
                assert_same_checkpoint(self._last, self._expected)
                self.tally.equal += 1
            except AssertionError as error:
                print(error, file=sys.stderr)
        shutil.rmtree(self._project)
        shutil.rmtree(self._folder / "cache", ignore_errors=True)  # the next one scans again


class ForkedJob:
    """Two ranks, forked from this process with all modules imported; as `jobs.Job`, in a session of their own.

    Args:
        args: of train.py.
        folder: gets what they print.
        env: variables.
    """

    def __init__(self, args: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / "said"
        self._code: int | None = None
        port = free_port()
        self._launcher = os.fork()
        if self._launcher == 0:
            code = 1
            try:
                os.setsid()
                with self._said.open("w") as said:
                    os.dup2(said.fileno(), 1)
                    os.dup2(said.fileno(), 2)
                os.environ.update(env)
                code = _launch(args, port)
            finally:
                os._exit(code)

    def __enter__(self) -> ForkedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, timeout: float, kill: bool = True) -> Outcome:
        """As `Job.wait`."""
        end = time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self._launcher, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                if kill:
                    tell_where(self.processes())
                    self.kill()
                raise AssertionError(f"the job is not over after {timeout} s\n{self._said.read_text()}")
            else:
                time.sleep(max(min(end - time.monotonic(), 0.02), 0))
        return Outcome(self._code, "", self._said.read_text(errors="replace"))

    def processes(self) -> list[int]:
        """Ids of the session's processes that live."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._launcher and state not in "ZX":
                    found.append(int(folder.name))
        return found

    def left_over(self, within_s: float) -> list[int]:
        """As `Job.left_over`."""
        time.sleep(within_s)
        return self.processes()

    def kill(self) -> list[int]:
        """As `Job.kill`."""
        killed: list[int] = []
        if self._code is None:
            os.kill(self._launcher, signal.SIGKILL)  # it may not have its session yet
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += pids
            time.sleep(0.01)
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._launcher, 0)[1])
        return killed


def _launch(args: Sequence[str], port: int) -> int:
    """Fork two ranks and wait for them; 0 where both end with 0. A rank notices by itself that another one is gone."""
    ranks = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ.update({**address, **place})
                code = run_rank_with_phases(list(args))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        ranks[pid] = rank
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.pop(pid)
        failed |= status != 0
    return int(failed)


def run_rank_with_phases(args: list[str]) -> int:
    """train.py as it is, with rank 0 noting in a file what it is doing."""
    import train

    set_activity = World.set_activity

    def note(world: World, what: str) -> None:
        phase = _PHASE_OF[what.split()[0]]
        if world.is_main:
            new = Path(os.environ["CHAOS_PHASE"] + ".new")
            new.write_text(phase)
            new.replace(os.environ["CHAOS_PHASE"])
        set_activity(world, what)

    World.set_activity = note  # type: ignore[method-assign]
    return train.main(args)


def main() -> int:
    """The command line; exits with 0 where every promise was kept."""
    if sys.argv[1:2] == ["--rank"]:
        return run_rank_with_phases(sys.argv[2:])
    parser = argparse.ArgumentParser(description="Kill runs at random moments and see what becomes of them.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true", help="start every run with torchrun: minutes become hours")
    parser.add_argument("--minutes", type=float, default=60, help="stop killing after so many")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    import train  # noqa: F401 - for the ranks that are forked

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        started = time.monotonic()
        campaign = Campaign(Path(folder), asked.seed, asked.torchrun)
        tally = campaign.tally
        print(f"An undisturbed run takes {campaign.life_s:.1f} s.", flush=True)
        while tally.kills < asked.kills and time.monotonic() - started < 60 * asked.minutes:
            kills = tally.kills
            campaign.strike()
            if tally.kills > kills and tally.kills % _SPARE_EVERY == 0:
                campaign.finish()
            if sys.stderr.isatty():
                print(f"\r{tally.kills} of {asked.kills} kills", end="", file=sys.stderr)
        if tally.kills % _SPARE_EVERY:
            campaign.finish()
        print(f"\n{tally.table()}\n{(time.monotonic() - started) / 60:.1f} minutes, seed {asked.seed}")
    return 0 if tally.clean and tally.kills >= asked.kills else 1


if __name__ == "__main__":
    sys.exit(main())
