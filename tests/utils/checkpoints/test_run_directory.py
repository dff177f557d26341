"""Laws of run directories."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import yaml

from tessera.utils.checkpoints.run_directory import new_run, newest_last_checkpoint, write_yaml
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World

T = TypeVar("T")


class Follower(World):
    """Rank 1, which learns what rank 0 found."""

    def __init__(self, result_of_rank_0: Path | UserError) -> None:
        super().__init__()
        self.rank, self._said = 1, result_of_rank_0

    def from_main(self, work: Callable[[], T]) -> Any:
        if isinstance(self._said, UserError):
            raise self._said
        return self._said


def open_run(project: Path, name: str, exist_ok: bool, world: World) -> Path:
    """The folder of a run that has written something."""
    with new_run(TrainConfig(project=str(project), name=name, exist_ok=exist_ok), world) as run:
        if world.is_main:
            (run / "results.csv").write_text("epoch\n")
    return run


def test_runs_are_numbered_and_none_is_reused(tmp_path: Path) -> None:
    runs = [open_run(tmp_path / "runs" / "train", "exp", False, World()) for _ in range(3)]
    assert [run.name for run in runs] == ["exp", "exp2", "exp3"]
    assert all(run.is_dir() and run.is_absolute() for run in runs)


def test_a_file_of_that_name_is_stepped_over(tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("not a folder")
    assert open_run(tmp_path, "exp", False, World()).name == "exp2"


def test_runs_started_at_the_same_instant_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: open_run(tmp_path / "runs", "exp", False, World()), range(64)))
    assert len(set(runs)) == 64
    assert {run.name for run in runs} == {"exp", *(f"exp{n}" for n in range(2, 65))}


def test_exist_ok_keeps_the_folder_and_what_is_in_it(tmp_path: Path) -> None:
    first = open_run(tmp_path, "exp", True, World())
    (first / "opt.yaml").touch()
    assert open_run(tmp_path, "exp", True, World()) == first
    assert {path.name for path in first.iterdir()} == {"results.csv", "opt.yaml"}


@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path, exist_ok: bool) -> None:
    (tmp_path / "project").write_text("a file where the folder of runs should be")
    with pytest.raises(UserError, match=r"Run directory .*project/exp: cannot be made.*--project"):
        open_run(tmp_path / "project", "exp", exist_ok, World())


def test_other_ranks_learn_the_path_or_the_error_and_touch_no_disk(tmp_path: Path) -> None:
    theirs = tmp_path / "elsewhere" / "exp7"
    assert open_run(tmp_path / "runs", "exp", False, Follower(theirs)) == theirs
    with pytest.raises(UserError, match="read-only"):
        open_run(tmp_path / "runs", "exp", False, Follower(UserError("read-only")))
    assert list(tmp_path.iterdir()) == []


def test_the_newest_checkpoint_counts_wherever_its_run_stands(tmp_path: Path) -> None:
    for age, run in enumerate(["exp3", "team/exp", "exp"]):
        weights = tmp_path / run / "weights"
        weights.mkdir(parents=True)
        for name, newer in (("last.pt", 0), ("best.pt", 1000)):
            (weights / name).touch()
            os.utime(weights / name, (2_000_000_000 - age + newer,) * 2)
    assert newest_last_checkpoint(tmp_path) == tmp_path / "exp3" / "weights" / "last.pt"
    os.utime(tmp_path / "team/exp/weights/last.pt", (2_100_000_000,) * 2)
    assert newest_last_checkpoint(tmp_path) == tmp_path / "team" / "exp" / "weights" / "last.pt"


def test_a_missing_checkpoint_is_reported_with_the_places_tried(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--resume: .*none/\*\*/weights/last\.pt \(no such folder\)"):
        newest_last_checkpoint(tmp_path / "none")
    (tmp_path / "exp4").mkdir()
    with pytest.raises(UserError, match="runs there: exp4"):
        newest_last_checkpoint(tmp_path)


def test_yaml_keeps_order_and_turns_values_into_plain_ones(tmp_path: Path) -> None:
    values = {
        "weights": Path("a") / "b.pt",
        "freeze": (0, 1),
        "lr0": np.float64(0.01),
        "anchors": np.array([[10, 13]]),
        "hyp": {"mosaic": 1.0},
        "name": "Größe",
        "resume": None,
    }
    write_yaml(tmp_path / "opt.yaml", values)
    text = (tmp_path / "opt.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {
        "weights": str(Path("a") / "b.pt"),
        "freeze": [0, 1],
        "lr0": 0.01,
        "anchors": [[10, 13]],
        "hyp": {"mosaic": 1.0},
        "name": "Größe",
        "resume": None,
    }
    assert [line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()] == list(values)


def test_a_yaml_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_yaml(tmp_path / "opt.yaml", {"epochs": 3})
    with pytest.raises(yaml.representer.RepresenterError):
        write_yaml(tmp_path / "opt.yaml", {"epochs": object()})
    assert yaml.safe_load((tmp_path / "opt.yaml").read_text()) == {"epochs": 3}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_killed_runs_were_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """But not what a living process is writing."""
    program = (
        "import sys, time; from pathlib import Path; from tessera.utils.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); print('.', flush=True); time.sleep(60)"
    )
    processes = []
    for name in ("killed", "alive"):
        command = [sys.executable, "-c", program, str(tmp_path / name / "weights" / "last.pt")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None and processes[-1].stdout.read(1) == b"."
    try:
        processes[0].kill()
        processes[0].wait()
        assert len(list(tmp_path.rglob(".last.pt.*.tmp"))) == 2
        open_run(tmp_path, "exp", False, World())
        (left,) = tmp_path.rglob(".last.pt.*.tmp")
        assert left.parent.parent.name == "alive"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
