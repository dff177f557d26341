"""Trainings in tiles: what they measure, that a resume is exact, and what they are worth on small objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tessera.commands import train, val
from tessera.utils.report.results import read_results
from tests.system import jobs
from tests.system.launch import ROOT, Command, Outcome
from tests.system.scenes import make_scenes
from tests.system.tiny import assert_same_checkpoint, flags, losses

TILES = ("--tile", "64", "--overlap", "0.25")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes"), train=5, val=3, size=160, objects=4)


def figures(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.said
    return [line.split() for line in outcome.out.splitlines() if line.split()[:1] == ["all"]][-1]


@pytest.mark.slow
def test_a_run_in_tiles_measures_whole_pictures_as_val_does(scenes: Path, tmp_path: Path, command: Command) -> None:
    hyp = tmp_path / "hyp.yaml"
    hyp.write_text((ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text() + "class_weights: auto\n")
    trained = command(train.main, *flags(scenes, tmp_path, "--epochs", "2", "--hyp", str(hyp), *TILES))
    run = tmp_path / "exp"
    best = run / "weights" / "best.pt"
    words = ["--weights", str(best), *TILES, "--project", str(tmp_path / "val"), "--workers", "0", "--device", "cpu"]
    measured = command(val.main, *words)
    assert figures(trained)[1:3] == ["3", "12"], "pictures and objects, not views"
    assert figures(trained) == figures(measured)
    assert "--tile 64: train: 5 images become 50 views" in trained.err
    assert "Class weights from 1 (" in trained.err, "of the pictures, which have as many of each class"
    assert "--source … --tile 64 --overlap 0.25" in trained.out
    flags_kept = yaml.safe_load((run / "opt.yaml").read_text())
    assert (flags_kept["tile"], flags_kept["overlap"]) == (64, 0.25)
    table = read_results(run / "results.csv")
    assert table.filter(regex="^(train|metrics)/").notna().all().all()
    assert table.filter(regex="^val/").isna().all().all(), "a whole picture has no loss"
    checked = command(train.main, "--data", str(scenes), "--check-data", *TILES)
    assert checked.code == 0 and "5 images become 50 views" in checked.err, checked.said


@pytest.mark.slow
def test_a_run_in_tiles_is_resumed_exactly(scenes: Path, tmp_path: Path) -> None:
    """Inside an epoch; also on other workers, and from a cache."""
    whole, stopped = tmp_path / "whole" / "exp", tmp_path / "stopped" / "exp"
    wanted = ("--epochs", "2", *TILES)
    done = jobs.train(tmp_path, 2, *flags(scenes, whole.parent, *wanted))
    assert done.code == 0, done.said
    ended = jobs.train(tmp_path, 2, *flags(scenes, stopped.parent, *wanted), fault="0 step 8 SIGTERM")
    last = stopped / "weights" / "last.pt"
    state = torch.load(last, weights_only=True)
    assert ended.code != 0 and state["epoch"] == 1 and state["step_in_epoch"] > 0, "inside the second epoch"
    resumed = jobs.train(tmp_path, 2, "--resume", str(last), "--device", "cpu", "--workers", "2", "--cache", "ram")
    assert resumed.code == 0 and "50 train views take" in resumed.err, resumed.said
    assert_same_checkpoint(last, whole / "weights" / "last.pt")
    assert losses(stopped).equals(losses(whole))


def test_tiles_that_cut_nothing_are_warned_of(scenes: Path, tmp_path: Path, command: Command) -> None:
    outcome = command(train.main, *flags(scenes, tmp_path, "--epochs", "1", "--tile", "160"))
    assert outcome.code == 0, outcome.said
    assert "WARNING: --tile 160: no image of train is larger; training on whole images." in outcome.err


@pytest.mark.slow
def test_small_objects_are_learnt_in_tiles_and_not_without(tmp_path: Path, command: Command) -> None:
    """Of scenes whose objects are 12 of 1,120 pixels, of which less than two are left on a whole picture at 160."""
    data = make_scenes(tmp_path, train=6, val=2, size=1120, objects=40)
    common = ["--cfg", "tessera-n.yaml", "--imgsz", "160", "--workers", "1", "--device", "cpu", "--noplots", "--noval"]
    common += ["--loggers", "none", "--data", str(data), "--project", str(tmp_path), "--nosave"]
    tiled = command(train.main, *common, "--tile", "160", "--epochs", "6", "--name", "with")
    whole = command(train.main, *common, "--epochs", "30", "--name", "without")
    with_tiles, without = (float(figures(outcome)[5]) for outcome in (tiled, whole))
    print(f"mAP50 {with_tiles:.3f} with tiles, {without:.3f} without")
    assert with_tiles > without + 0.2
