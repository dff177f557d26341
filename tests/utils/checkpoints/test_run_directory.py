"""Run directories: numbering, leftovers, the newest checkpoint, YAML files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tessera
from tessera.utils.checkpoints.run_directory import new_run, newest_best_checkpoint, newest_last_checkpoint
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write
from tessera.utils.ranks.world import World
from tests.leftover import leave_behind


def open_run(project: Path, name: str, exist_ok: bool) -> Path:
    """The folder of a run that has written something."""
    with new_run(TrainConfig(project=str(project), name=name, exist_ok=exist_ok), World()) as run:
        (run / "results.csv").write_text("epoch\n")
    return run


def test_runs_that_start_concurrently_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "exp3").write_text("a file of that name is stepped over")
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: open_run(tmp_path, "exp", False), range(64)))
    assert len(runs) == 64 and {run.name for run in runs} == {"exp", "exp2", *(f"exp{n}" for n in range(4, 66))}
    assert all(run.is_dir() and run.is_absolute() for run in runs)


def test_exist_ok_reuses_the_directory(tmp_path: Path) -> None:
    first = open_run(tmp_path, "exp", True)
    (first / "opt.yaml").touch()
    assert open_run(tmp_path, "exp", True) == first
    assert {path.name for path in first.iterdir()} == {"results.csv", "opt.yaml"}


@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path, exist_ok: bool) -> None:
    (tmp_path / "project").write_text("a file where the folder of runs should be")
    with pytest.raises(UserError, match=r"Run directory .*project/exp: cannot be made.*--project"):
        open_run(tmp_path / "project", "exp", exist_ok)


def test_the_newest_checkpoint_of_all_runs_is_resumed(tmp_path: Path) -> None:
    for age, run in enumerate(["exp3", "team/exp", "exp"]):
        weights = tmp_path / run / "weights"
        weights.mkdir(parents=True)
        for name, newer in (("last.pt", 0), ("best.pt", 1000)):
            (weights / name).touch()
            os.utime(weights / name, (2_000_000_000 - age + newer,) * 2)
    assert newest_last_checkpoint(tmp_path) == tmp_path / "exp3" / "weights" / "last.pt"
    os.utime(tmp_path / "team/exp/weights/last.pt", (2_100_000_000,) * 2)
    assert newest_last_checkpoint(tmp_path) == tmp_path / "team" / "exp" / "weights" / "last.pt"


def test_without_weights_the_newest_run_is_used_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = (
        tessera.Detector,
        lambda: tessera.val(data="none.yaml"),
        lambda: tessera.detect(source="."),
        tessera.export,
    )
    for call in calls:
        with pytest.raises(UserError, match=r"^--weights: not given: found .* --weights yolox_s\.pth \(Apache-2\.0"):
            call()
    for age, run in enumerate(["exp2", "exp"]):
        weights = tmp_path / "runs" / "train" / run / "weights"
        weights.mkdir(parents=True)
        (weights / "last.pt").touch()
        os.utime(weights / "last.pt", (2_000_000_000 - age,) * 2)
    with pytest.raises(UserError, match=r"newest run has no .*exp2/weights/best\.pt yet"):
        newest_best_checkpoint()
    (tmp_path / "runs/train/exp2/weights/best.pt").touch()
    for call in calls:
        with pytest.raises(UserError, match=r"exp2/weights/best\.pt"), caplog.at_level("INFO"):
            call()
    assert caplog.text.count(f"--weights {tmp_path}/runs/train/exp2/weights/best.pt: the newest run's.") == len(calls)


def test_a_missing_checkpoint_is_reported_with_the_places_tried(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--resume: .*none/\*\*/weights/last\.pt \(no such directory\)"):
        newest_last_checkpoint(tmp_path / "none")
    (tmp_path / "exp4").mkdir()
    with pytest.raises(UserError, match="runs there: exp4"):
        newest_last_checkpoint(tmp_path)


def test_leftovers_of_killed_runs_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """But not the file that a living process is writing."""
    left = leave_behind(tmp_path / "killed" / "weights" / "last.pt")
    with atomic_write(tmp_path / "alive" / "weights" / "last.pt"):
        open_run(tmp_path, "exp", False)
        assert not left.exists() and len(list(tmp_path.rglob(".*.tmp"))) == 1
