"""Workers in several processes on one journal, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import optuna
import pytest

from tessera.analysis.search.search_directory import JOURNAL
from tessera.analysis.search.study import SharedStudy, load_optuna
from tests.analysis.search.searches import table
from tests.analysis.search.test_evolve import FILES
from tests.data.feed.another_process import another_process
from tests.system.jobs import Job

TRIALS = 12


def worker(tmp_path: Path, name: str) -> Job:
    command = [sys.executable, "-m", "tests.analysis.search.searches", str(tmp_path), str(TRIALS), "0.3"]
    return Job(command, tmp_path / "said" / name)


def trials(folder: Path, study: str = "trials") -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name=study, storage=optuna.storages.JournalStorage(backend)).trials


@pytest.mark.slow
def test_two_workers_share_a_journal_and_one_outlives_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with worker(tmp_path, "a") as a, worker(tmp_path, "b") as b:

        def at_work() -> bool:
            """Both are, have been for a while, and are not at the last epoch of a trial."""
            with contextlib.suppress(FileNotFoundError):
                epochs = [path.read_text() for path in folder.glob("trial*/results.csv")]
                return len(table(folder)) > 2 and len(epochs) == 2 and "3\n" not in epochs
            return False

        a.until(at_work)
        a.kill()  # with SIGKILL
        outcome = b.wait()
    assert outcome.code == 0, outcome.said
    ended = trials(folder)
    (lost,) = re.findall(r"Trial (\d+) was left unfinished", outcome.err)
    assert ended[int(lost)].user_attrs["worker"].endswith(f"-{b.process.pid}"), outcome.said
    assert len(ended) == TRIALS and all(t.state.name in ("COMPLETE", "PRUNED") for t in ended)
    assert len({t.user_attrs["worker"] for t in ended}) == 2
    again = trials(folder, f"the best of {TRIALS}")
    assert sorted((t.params["set"], t.params["seed"]) for t in again) == [(s, k) for s in range(4) for k in (1, 2, 3)]
    assert len(table(folder)) == TRIALS
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_worker_that_is_killed_while_it_writes_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).touch()

    def killed(_: Connection) -> None:
        study = SharedStudy(load_optuna(), tmp_path, "trial", "trials", 10)
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        study.claim(5, {}, 0)

    with another_process(killed) as (process, _):
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert SharedStudy(load_optuna(), tmp_path, "trial", "trials", 10).claim(5, {}, 0) is not None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(f"{JOURNAL}.")]
