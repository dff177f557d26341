"""`--resume auto`: one command begins a run, goes on with it, and lets it be once it is done."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tessera.commands import train
from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint, save_checkpoint
from tessera.utils.errors import ConfigError, UserError
from tests.system.tiny import make_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=8, val=4)


def command(data: Path, project: Path, **flags: Any) -> dict[str, Any]:
    fixed = {"imgsz": 32, "batch_size": 8, "workers": 0, "noplots": True, "loggers": "none", "device": "cpu"}
    return {"data": str(data), "project": str(project), "name": "night", "resume": "auto", **fixed, **flags}


@pytest.fixture(scope="module")
def night(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("runs")
    assert train.run(**command(data, project, epochs=2, save_period=1)) is not None
    return project / "night"


@pytest.fixture
def run(night: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    (tmp_path / "night" / "weights").mkdir(parents=True)
    for name in ("results.csv", "weights/last.pt", "weights/best.pt", "weights/epoch0.pt", "weights/epoch1.pt"):
        (tmp_path / "night" / name).write_bytes((night / name).read_bytes())
    return tmp_path / "night"


def test_a_run_that_is_done_stays_as_it_is_and_goes_on_with_more_epochs(data: Path, run: Path) -> None:
    before = (run / "weights" / "last.pt").read_bytes()
    assert train.run(**command(data, run.parent, epochs=2)) is None
    assert (run / "weights" / "last.pt").read_bytes() == before
    assert train.run(**command(data, run.parent, epochs=3)) is not None
    assert load_checkpoint(run / "weights" / "last.pt")["epoch"] == 3
    assert [path.name for path in run.parent.glob("night*")] == ["night"]


def test_a_run_that_has_stopped_early_is_done(data: Path, run: Path) -> None:
    last = run / "weights" / "last.pt"
    saved = load_checkpoint(last)
    saved["stopper"] = {"best_fitness": 0.5, "best_epoch": 0}
    save_checkpoint(last, saved)
    assert train.run(**command(data, run.parent, epochs=9, patience=1)) is None


def test_a_damaged_checkpoint_gives_way_to_the_newest_whole_one(
    data: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = run / "weights"
    for name in ("last.pt", "epoch1.pt"):
        (weights / name).write_bytes((weights / name).read_bytes()[:-1000])
    with caplog.at_level(logging.WARNING, "tessera"):
        assert train.run(**command(data, run.parent, epochs=2)) is not None
    warned = [text for text in caplog.messages if "--resume auto" in text]
    assert len(warned) == 3 and "last.pt" in warned[0] and "epoch1.pt" in warned[1]
    assert "last.pt is damaged" in warned[2] and warned[2].endswith("epoch0.pt")
    assert load_checkpoint(weights / "last.pt")["epoch"] == 2


@pytest.mark.parametrize("left", ["damaged", "missing", "best.pt alone"])
def test_nothing_is_begun_over_the_results_of_a_run(data: Path, run: Path, left: str) -> None:
    for path in (run / "weights").iterdir():
        if left == "damaged":
            path.write_bytes(b"cut")
        elif left == "missing" or path.name != "best.pt":
            path.unlink()
    if left == "best.pt alone":
        (run / "results.csv").unlink()
    with pytest.raises(UserError, match=f"the run in {run} had begun, but .*(whole|missing), and beginning anew"):
        train.run(**command(data, run.parent, epochs=2))


def test_a_start_that_died_before_its_first_checkpoint_begins_again(data: Path, tmp_path: Path, night: Path) -> None:
    best = tmp_path / "night" / "weights" / "best.pt"  # of a fine-tuning: what it began with is its best so far
    best.parent.mkdir(parents=True)
    save_checkpoint(best, {**load_any_checkpoint(night / "weights" / "best.pt"), "epoch": 0})
    assert train.run(**command(data, tmp_path, epochs=1)) is not None
    assert [path.name for path in tmp_path.glob("night*")] == ["night"]


@pytest.mark.parametrize("flag", ["data", "cfg", "weights"])
def test_the_folder_of_another_run_is_refused(data: Path, run: Path, flag: str) -> None:
    other = {flag: {"data": "shapes.yaml", "cfg": "tessera-s.yaml", "weights": "yolov5n.pt"}[flag]}
    with pytest.raises(ConfigError, match=f"--{flag} '.*' with --resume auto: the run in {run} has .*another --name"):
        train.run(**{**command(data, run.parent, epochs=9), **other})


def test_a_run_without_a_name_is_refused(data: Path, tmp_path: Path) -> None:
    nameless = command(data, tmp_path)
    del nameless["name"]
    with pytest.raises(ConfigError, match="--resume auto: found no --name"):
        train.run(**nameless)
