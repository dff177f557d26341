"""A fault campaign: runs of two to four ranks struck at random moments of their life, each followed by a resume.

    make chaos            # 1,000 strikes, and a table of what became of them; the same command resumes where it was
    make chaos KILLS=10

A strike is SIGKILL of everything, of a rank, a loader worker or the launcher, or SIGSTOP of one of these. What is not
struck must end by itself within its time limits, and say why. Then the same command is given again, with --resume where
there is a checkpoint, until a run comes to its end; that one must have the weights of a run that nobody disturbed, bit
for bit, and the next one begins. test_frozen.py and test_two_hosts.py cut off hosts.

Half of a short run under torchrun is Python importing modules, which no strike can harm: so the ranks are forked here
from a process that has them. Moments are drawn uniformly from the time that an undisturbed run takes. After every
fourth the run is let go on to its end. Strike k of a seed is always the same one, so the folder of a campaign that was
interrupted is all that is needed to resume it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tessera.commands import train
from tessera.utils.checkpoints.format import load_checkpoint
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World
from tests.system.chaos_job import ForkedJob
from tests.system.jobs import shared_memory
from tests.system.launch import Outcome
from tests.system.tiny import assert_same_checkpoint, flags, make_data

_PHASE_OF = {  # by the first word of what a rank says it does
    "waiting": "start",
    "reading": "scan",
    "building": "start",
    "training": "step",
    "validating": "validation",
    "saving": "save",
    "measuring": "end",
}
_LIMITS = {"TESSERA_PEER_TIMEOUT": "6", "TESSERA_JOIN_TIMEOUT": "20"}
_HANG_S = 90.0  # several times these limits: the machine may be busy
_WHOLE_RUN_S = 240.0
_SPARE_EVERY = 4
_NAMES = re.compile(
    r"rank \d: error: |Stopped by SIG|has been stopped|error: a loader worker is gone|Results in "
)  # or it was done


class Strike(NamedTuple):
    """What is done, to a job of which kind.

    Attributes:
        target: "all", "rank 0" and so on, "launcher" or "worker".
        number: the signal.
        layout: "plain" (rank 0 keeps the store) or "launcher" (the launcher does).
    """

    target: str
    number: signal.Signals
    layout: str

    def __str__(self) -> str:
        return f"{'stop' if self.number == signal.SIGSTOP else 'kill'} {self.target} ({self.layout})"


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP
_LAYOUTS = ("plain", "launcher")
_ALONE = [
    *(Strike("all", _KILL, layout) for layout in _LAYOUTS * 2),
    *(Strike("worker", number, "plain") for number in (_KILL, _STOP)),
    *(Strike("launcher", number, "launcher") for number in (_KILL, _STOP)),
]
_RANKS = (2, 3, 4)


def strikes(ranks: int) -> list[Strike]:
    """Return the strikes of a job, from which one is drawn."""
    by_rank = itertools.product(range(ranks), (_KILL, _STOP), _LAYOUTS)
    return [*_ALONE, *(Strike(f"rank {rank}", *how) for rank, *how in by_rank)]


@dataclass
class Tally:
    """Counts of what became of the strikes, and a line for each broken promise; saved in a file."""

    life_s: dict[str, float] = field(default_factory=dict)  # of an undisturbed run, by the number of ranks
    strikes: int = 0
    finished: int = 0
    equal: int = 0
    slowest_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def table(self) -> str:
        rows = [("strikes", self.strikes), *sorted(self.counts.items()), ("runs finished", self.finished)]
        rows += [("  with the undisturbed run's bits", self.equal), ("promises that were not kept", len(self.broken))]
        rows += [("slowest end after a strike, seconds", round(self.slowest_s))]
        return "\n".join(f"{name:<48}{value:>6}" for name, value in rows)

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(self), indent=1))
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Tally:
        """Return what was saved before; an empty one where nothing was."""
        found = json.loads(path.read_text()) if path.is_file() else {}
        return cls(**{**found, "counts": Counter(found.get("counts"))})


class Campaign:
    """Runs, strikes and checks; everything it writes lies in `folder`, from which it resumes.

    Args:
        folder: for data, caches, runs and the tally.
        seed: of the strikes.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        folder.mkdir(parents=True, exist_ok=True)
        self._data = folder / "tiny.yaml" if any(folder.glob("undisturbed*.pt")) else make_data(folder)
        self._project = folder / "runs"
        self._phase, self._file = folder / "phase", folder / "tally.json"
        self._last = self._project / "exp" / "weights" / "last.pt"
        self._env = {"TESSERA_CACHE": str(folder / "cache"), "CHAOS_PHASE": str(self._phase), **_LIMITS}
        self.tally = Tally.load(self._file)
        self._draw_ranks()

    def _draw_ranks(self) -> None:
        """Draw the number of ranks of the next run; the first such run is undisturbed."""
        self._ranks = random.Random(f"{self._seed} run {self.tally.finished}").choice(_RANKS)
        self._expected = self._folder / f"undisturbed{self._ranks}.pt"
        if self._expected.is_file():
            return
        started = time.monotonic()
        with self._start("plain") as job:
            outcome = job.wait(_WHOLE_RUN_S)
            assert outcome is not None and outcome.code == 0, job.said
        self.tally.life_s[str(self._ranks)] = time.monotonic() - started
        self.tally.save(self._file)
        self._last.replace(self._expected)
        shutil.rmtree(self._project)
        shutil.rmtree(self._folder / "cache")

    def strike(self) -> None:
        """Start or resume, and strike at a random moment; a run that ends before is compared, and the next begins."""
        tally = self.tally
        dice = random.Random(f"{self._seed} {tally.strikes} {tally.finished}")
        strike = dice.choice(strikes(self._ranks))
        moment = dice.uniform(0, tally.life_s[str(self._ranks)])
        going_on, saved, before = self._last.is_file(), self._whole_step(), shared_memory()
        with self._start(strike.layout) as job:
            outcome = job.wait(moment)
            if outcome is not None:
                self._close_run(outcome)
                tally.save(self._file)
                return
            phase = self._phase.read_text() if self._phase.is_file() else "start"
            self._hit(job, strike)
            killed = job.kill()
        tally.strikes += 1
        saving = "  resumed" if going_on else "  nothing saved yet"
        tally.counts.update((f"  in {phase}", f"  {strike}", saving, f"  on {self._ranks} ranks"))
        ids = set(map(str, [*killed, *job.seen]))
        left = {name for name in shared_memory() - before if ids & set(name.replace("-", "_").split("_"))}
        tally.broken += [f"{strike} in {phase}: left over: {name}" for name in sorted(left)]
        step = self._whole_step()
        if step < saved:
            tally.broken.append(f"{strike} in {phase}: step {saved} before, {step} after it")
        if tally.strikes % _SPARE_EVERY == 0:
            self._finish()
        tally.save(self._file)

    def _hit(self, job: ForkedJob, strike: Strike) -> None:
        """Strike, and wait until all other processes have ended."""
        job.note()
        pids = self._targets(job, strike)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, strike.number)
        if strike.target == "all":
            return
        stopped = pids if strike.number == _STOP and strike.target != "worker" else set()

        def left() -> set[int]:
            """Return the processes that must end: not those that are stopped, nor what waits for them."""
            waiting = (job.descendants(pid) for pid in stopped if strike.target != "launcher")
            return set(job.processes()) - {job.launcher} - stopped.union(*waiting)

        others, started = left(), time.monotonic()
        while left() and time.monotonic() - started < _HANG_S:
            job.note()
            time.sleep(0.05)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - started)
        if hanging := left():
            job.tell_where()
            what = f"{sorted(hanging)} hang"
            self.tally.broken.append(f"strike {self.tally.strikes}, {strike}: {what}\n{job.said[-6000:]}")
        elif "Traceback" in job.said or (pids and others and not _NAMES.search(job.said)):
            self.tally.broken.append(f"strike {self.tally.strikes}, {strike}: no message\n{job.said[-3000:]}")

    def _targets(self, job: ForkedJob, strike: Strike) -> set[int]:
        """Return the processes that get the signal; none where the job has no such process at this moment."""
        kind, _, number = strike.target.partition(" ")
        if kind == "all":
            return set(job.processes())
        if kind == "launcher":
            return {job.launcher}
        rank = job.rank(int(number or 0))
        if kind == "worker":
            return set(sorted(job.descendants(rank) - {rank})[:1]) if rank else set()
        return {rank} if kind == "rank" and rank else set()

    def _finish(self) -> None:
        """Resume the run that was struck last, or start one, without a strike."""
        with self._start("launcher") as job:
            outcome = job.wait(_WHOLE_RUN_S)
            if outcome is None:
                job.tell_where()
                self.tally.broken.append(f"after strike {self.tally.strikes}: the resume hangs\n{job.said[-6000:]}")
                return
        self._close_run(outcome)

    def _start(self, layout: str) -> ForkedJob:
        self._phase.unlink(missing_ok=True)
        if self._last.is_file():
            args = ["--resume", str(self._last), "--device", "cpu"]
        else:
            own = ("--batch", "12", "--epochs", "2", "--save-steps", "1", "--exist-ok")
            args = flags(self._data, self._project, *own)
        run = partial(run_rank_with_phases, args)
        return ForkedJob(run, self._folder / "said", self._env, keeps_store=layout != "plain", ranks=self._ranks)

    def _whole_step(self) -> int:
        """Return the step of the checkpoint; -1 where there is none. A damaged one is noted."""
        if not self._last.is_file():
            return -1
        try:
            return int(load_checkpoint(self._last)["step"])
        except UserError as error:
            self.tally.broken.append(str(error))
            return -1

    def _close_run(self, outcome: Outcome) -> None:
        tally = self.tally
        if outcome.code != 0 and "nothing left to train" not in outcome.err:  # struck at its very end
            tally.broken.append(f"after strike {tally.strikes}: did not go on: {outcome.said[-3000:]}")
        else:
            tally.finished += 1
            tally.broken += [f"after strike {tally.strikes}: {path}" for path in self._project.rglob("*.tmp")]
            try:
                assert_same_checkpoint(self._last, self._expected)
                tally.equal += 1
            except AssertionError as error:
                tally.broken.append(f"after strike {tally.strikes}: {error}")
        shutil.rmtree(self._project)
        shutil.rmtree(self._folder / "cache", ignore_errors=True)  # the next one scans again
        self._draw_ranks()


def run_rank_with_phases(args: list[str]) -> int:
    """Run train.py, with rank 0 noting in a file what it is doing."""
    set_activity = World.set_activity

    def note(world: World, what: str) -> None:
        if world.is_main:
            new = Path(os.environ["CHAOS_PHASE"] + ".new")
            new.write_text(_PHASE_OF[what.split()[0]])
            new.replace(os.environ["CHAOS_PHASE"])
        set_activity(world, what)

    World.set_activity = note  # type: ignore[method-assign]
    return train.main(args)


def main() -> int:
    """Run strikes; return 0 where every promise was kept."""
    parser = argparse.ArgumentParser(description="Strike runs at random moments and see what becomes of them.")
    parser.add_argument("--kills", type=int, default=1000, help="strikes in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the campaign lies (default: a temporary one of the seed)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = asked.folder or Path(tempfile.gettempdir()) / f"tessera-chaos-{asked.seed}"
    started = time.monotonic()
    campaign = Campaign(folder, asked.seed)
    tally = campaign.tally
    print(f"{tally.strikes} strikes done; {folder}", flush=True)
    while tally.strikes < asked.kills:
        campaign.strike()
    print(f"\n{tally.table()}\n{(time.monotonic() - started) / 60:.1f} minutes, seed {asked.seed}")
    print("\n".join(tally.broken), file=sys.stderr)
    return int(bool(tally.broken) or tally.equal < tally.finished or not tally.finished)


if __name__ == "__main__":
    sys.exit(main())
