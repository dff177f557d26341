"""Pairs of starts of one run at the same time: one writes, and the other waits for it, or is refused.

    python -m tests.system.pairs 30

Both have the same command, with --resume auto or with the checkpoint of a run that has begun, on one rank or two.
Either the second waits for the first one's end; or it may wait for a second only; or the first one's rank 0 is killed
at a random moment, and the second goes on. Then each epoch must be in results.csv once, the run directory must hold the
files of an undisturbed run, and where both starts have as many ranks, its weights. Ranks are forked, as chaos.py does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from tessera.commands import train
from tessera.utils.ranks.run_lock import LOCK
from tessera.utils.report.results_csv import read_results
from tests.system.chaos_job import ForkedJob
from tests.system.launch import wait_until
from tests.system.tiny import assert_same_checkpoint, flags, make_data

EPOCHS = 3
KINDS = [*itertools.product(("killed", "waits", "refused"), ("auto", "PATH"), ((1, 1), (1, 2), (2, 1), (2, 2)))]
_LIMITS = {"TESSERA_PEER_TIMEOUT": "10", "TESSERA_JOIN_TIMEOUT": "60"}
_HANG_S = 200.0
_LIFE_S = 4.0  # of a run that nobody disturbs, about: what it is killed in


class Campaign:
    """Pairs and checks; everything that they write lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._dice = folder, random.Random(0)
        self._data = make_data(folder)
        self._project, self._expected = folder / "runs", folder / "undisturbed"
        self._begun = folder / "begun"
        self._run_alone(1, self._command("auto", self._begun, epochs=1))
        for start, ranks in itertools.product(("auto", "PATH"), (1, 2)):
            run = self._expected / f"{start}{ranks}"
            if start == "PATH":
                shutil.copytree(self._begun, run)
            self._run_alone(ranks, self._command(start, run))

    def pair(self, end: str, start: str, ranks: tuple[int, int]) -> str:
        """Start two, let them come to their ends, and check what they leave; returns how they ended.

        Raises:
            AssertionError: a promise is not kept.
        """
        run = self._project / "run"
        shutil.rmtree(self._project, ignore_errors=True)
        if start == "PATH":
            shutil.copytree(self._begun, run)
        env = {"TESSERA_LOCK_TIMEOUT": "1"} if end == "refused" else {}
        with contextlib.ExitStack() as stack:
            jobs = [
                stack.enter_context(self._start(f"said{number}", size, self._command(start, run), env))
                for number, size in enumerate(ranks)
            ]

            def said() -> str:
                return f"{end}, {start}, {ranks}\n" + "\n---\n".join(job.said[-5000:] for job in jobs)

            held = [""]

            def is_held() -> bool:
                with contextlib.suppress(OSError):
                    held[0] = (run / LOCK).read_text()
                return held[0].endswith("\n")

            wait_until(is_held, _HANG_S, said)
            first, second = jobs if str(jobs[0].rank(0)) == held[0].split()[1] else jobs[::-1]
            holder = first.rank(0)
            struck = False
            if end == "killed":
                time.sleep(self._dice.uniform(0, _LIFE_S))
                if holder and (struck := first.rank(0) == holder):
                    os.kill(holder, signal.SIGKILL)
            outcomes = [job.wait(_HANG_S) for job in (first, second)]
            assert None not in outcomes, f"a start hangs: {said()}"
            assert not any(job.processes() for job in jobs), said()
        assert "Traceback" not in said(), said()
        codes = [outcome.code for outcome in outcomes if outcome]
        assert ("is still being written by process" in second.said) == (end == "refused"), said()
        over = "nothing left to train" in second.said
        if end == "refused":
            assert codes == [0, 1], said()
        elif end == "waits":
            assert codes[0] == 0 and ("is finished, after" in second.said if start == "auto" else over), said()
        else:
            assert codes[1] == 0 or over, said()
        assert [path.name for path in self._project.iterdir()] == [run.name]
        assert read_results(run / "results.csv")["epoch"].tolist() == [*range(EPOCHS)]
        expected = self._expected / f"{start}{ranks[0]}"
        assert _files(run) == _files(expected), _files(run) ^ _files(expected)
        if ranks[0] == ranks[1]:
            assert_same_checkpoint(run / "weights" / "last.pt", expected / "weights" / "last.pt")
        return end if struck or end != "killed" else "ended before it was killed"

    def _command(self, start: str, run: Path, epochs: int = EPOCHS) -> list[str]:
        own = ["--epochs", str(epochs), "--save-steps", "1"]
        if start == "PATH":
            return ["--resume", str(run / "weights" / "last.pt"), "--device", "cpu", *own]
        return flags(self._data, run.parent, "--name", run.name, "--sync-bn", "--resume", "auto", *own)

    def _run_alone(self, ranks: int, command: list[str]) -> None:
        with self._start("alone", ranks, command, {}) as job:
            outcome = job.wait(_HANG_S)
            assert outcome is not None and outcome.code == 0, job.said

    def _start(self, said: str, ranks: int, command: list[str], env: dict[str, str]) -> ForkedJob:
        env = {"TESSERA_CACHE": str(self._folder / "cache"), **_LIMITS, **env}
        return ForkedJob(partial(train.main, command), self._folder / said, env, keeps_store=False, ranks=ranks)


def _files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def main() -> int:
    """Run pairs; return 0 where every promise was kept."""
    count = int(sys.argv[1]) if sys.argv[1:] else 30
    torch.set_num_threads(1)
    broken, kinds = 0, [*KINDS]
    random.Random(0).shuffle(kinds)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        for number, kind in enumerate(itertools.islice(itertools.cycle(kinds), count), 1):
            try:
                print(f"{number}: {kind}: {campaign.pair(*kind)}", flush=True)
            except AssertionError as error:
                broken += 1
                print(f"{number}: {kind}: {error}", file=sys.stderr, flush=True)
    print(f"{count} pairs, {broken} of them broken")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
