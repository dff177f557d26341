"""Several starts of one run: one process writes at a time."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tessera.analysis.charts import read_results
from tessera.utils.files import LOCK
from tessera.utils.ranks.run_lock import RunLock
from tests.system.jobs import Job
from tests.system.launch import ROOT, python_command, run_python, torchrun, torchrun_command
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("killed", [False, True])
def test_pairs_of_starts_train_each_epoch_once(tmp_path: Path, killed: bool) -> None:
    """The second start waits for the first one, of two ranks where it is not killed, and resumes it where it is."""
    words = flags(make_data(tmp_path), tmp_path, "--epochs", "3", "--save-steps", "1", "--sync-bn")
    words += ["--resume", "auto", "--name"]
    program, run = ROOT / "train.py", tmp_path / "run"
    alone = python_command(program, *words, "run")
    command = alone if killed else torchrun_command(program, *words, "run")

    def holder() -> int:
        with contextlib.suppress(OSError, IndexError):
            return int((run / LOCK).read_text().split()[1])
        return 0

    with Job(command, tmp_path / "first") as first:
        first.until(holder)
        with Job(alone, tmp_path / "second", {"TESSERA_LOCK_TIMEOUT": "120"}) as second:
            if killed:
                first.until((run / "weights" / "last.pt").is_file)
                os.kill(holder(), signal.SIGKILL)
            outcomes = [job.wait() for job in (first, second)]
    said = "\n".join(outcome.said for outcome in outcomes)
    assert [outcome.code == 0 for outcome in outcomes] == [not killed, True], said
    assert ("is finished, after" in outcomes[1].said) != killed, said
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1, 2]
    if killed:
        undisturbed = run_python(program, *words, "alone")
        assert undisturbed.code == 0, undisturbed.said
        files = [{path.relative_to(one) for path in one.rglob("*")} for one in (run, tmp_path / "alone")]
        assert files[0] == files[1]
        assert_same_checkpoint(run / "weights" / "last.pt", tmp_path / "alone" / "weights" / "last.pt")
        assert losses(run).equals(losses(tmp_path / "alone"))


def test_no_rank_waits_for_the_first_one_longer_than_for_a_control_message(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=8, val=2)
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "opt.yaml").touch()
    with RunLock(tmp_path / "night") as lock:
        assert lock.take() is None
        args = flags(data, tmp_path, "--resume", "auto", "--name", "night")
        limits = {"TESSERA_CONTROL_TIMEOUT": "4", "TESSERA_LOCK_TIMEOUT": "10"}
        outcome = torchrun(ROOT / "train.py", *args, env=limits)
        assert outcome.code == 1 and "control message" not in outcome.err, outcome.said
        assert outcome.err.count("night is being written by process") == 1, outcome.said
        assert outcome.err.count("night is still being written by process") == 1, outcome.said
        assert {path.name for path in (tmp_path / "night").iterdir()} == {LOCK, "opt.yaml"}
