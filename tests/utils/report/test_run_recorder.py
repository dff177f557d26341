"""Recorder of a run, also where it cannot be written."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch
import yaml
from tessera.utils.report.run_recorder import EpochMetrics, RunRecorder

import tessera
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.errors import UserError
from tessera.utils.evaluation.curves import summarize
from tessera.utils.files import atomic_write
from tessera.utils.ranks.world import World
from tessera.utils.report.image_grid import SampleImageCollector
from tessera.utils.report.results_csv import read_results
from tessera.utils.report.trackers import Loggers
from tests.data.made_index import make_index
from tests.utils.evaluation.made_images import accumulate

HYP = load_hyp("hyp.scratch-low.yaml")
INDEX = make_index([])
EPOCH = EpochMetrics((0.1, 0.2, 0.3), None, (0.01, 0.01, 0.01), seconds=1.0, data_wait=0.5, images_per_s=10.0)


def open_recorder(run: Path, start_epoch: int = 0, hyp: Hyp = HYP, **flags: Any) -> RunRecorder:
    context = RunContext(TrainConfig(loggers="none", **flags), hyp, World(), 64, 32, run, resumed=start_epoch > 0)
    return RunRecorder(context, INDEX, ("box", "obj", "cls"), start_epoch=start_epoch)


def test_an_epoch_that_is_run_again_replaces_its_row(tmp_path: Path) -> None:
    with open_recorder(tmp_path, noplots=True) as recorder:
        for epoch in range(3):
            recorder.epoch(epoch, EPOCH)
    with open_recorder(tmp_path, noplots=True, start_epoch=2) as recorder:
        recorder.epoch(2, dataclasses.replace(EPOCH, seconds=7.0))
    table = read_results(tmp_path / "results.csv")
    assert table["epoch"].tolist() == [0, 1, 2]
    assert table["time/epoch_s"].tolist() == [1, 1, 7]
    first, *_ = (tmp_path / "opt.yaml").read_text().splitlines()
    assert first.startswith(f"# tessera_version {tessera.__version__}, ") and first.endswith(torch.__version__)
    assert yaml.safe_load((tmp_path / "opt.yaml").read_text())["epochs"] == 100
    assert (tmp_path / "hyp.yaml").is_file()


def test_a_resume_names_the_epochs_whose_rows_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "results.csv"
    with open_recorder(tmp_path, noplots=True) as recorder:
        for epoch in range(3):
            recorder.epoch(epoch, EPOCH)
    caplog.clear()
    open_recorder(tmp_path, noplots=True, start_epoch=3)
    assert not caplog.messages
    path.write_text(path.read_text()[:-60])
    open_recorder(tmp_path, noplots=True, start_epoch=3)
    path.unlink()
    open_recorder(tmp_path, noplots=True, start_epoch=7)
    one, seven = caplog.messages
    assert "results.csv: the rows of 1 trained epoch are missing (2), also" in one
    assert "7 trained epochs are missing (0, 1, 2, 3, 4, and 2 more)" in seven


def test_the_first_epoch_says_how_long_the_others_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with open_recorder(tmp_path, noplots=True, start_epoch=2, epochs=10) as recorder:
        for epoch in (2, 3):
            recorder.epoch(epoch, dataclasses.replace(EPOCH, seconds=30.0))
    assert [text for text in caplog.messages if "pace" in text] == ["7 more epochs at this pace: about 4 min"]


def test_trackers_get_the_optimizer_that_is_used_and_both_of_two_values_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MagicMock()
    monkeypatch.setattr("tessera.utils.report.run_recorder.Loggers", opened)
    open_recorder(tmp_path, hyp=dataclasses.replace(HYP, optimizer="AdamW", close_mosaic=0.25), noplots=True)
    config = opened.call_args.args[2]
    assert config["optimizer"] == "AdamW" and config["lr0"] == 0.01
    assert (config["close_mosaic"], config["hyp_close_mosaic"]) == (-1, 0.25)


def test_other_ranks_write_no_image_and_start_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.rank = 1
    monkeypatch.setattr(World, "run_on_main", lambda self, action: None)
    before = threading.active_count()
    with RunRecorder(RunContext(TrainConfig(), HYP, world, 64, 32, tmp_path), INDEX, ("box",)) as recorder:
        recorder.epoch(0, dataclasses.replace(EPOCH, losses=(0.1,)))
        recorder.finish(0, 0, tmp_path / "best.pt", 0.5)
        assert not recorder.renders and threading.active_count() == before
    assert not list(tmp_path.iterdir())


def test_an_epoch_that_a_resumed_run_only_validates_has_no_times(tmp_path: Path) -> None:
    """Those of a validation would pass for a whole epoch's."""
    with open_recorder(tmp_path, noplots=True) as recorder:
        recorder.epoch(0, dataclasses.replace(EPOCH, seconds=0.1, data_wait=0.0, images_per_s=0.0))
    row = pd.read_csv(tmp_path / "results.csv").iloc[0]
    assert row[["time/epoch_s", "time/data_wait", "images_per_s"]].isna().all()
    assert row["train/box_loss"] == 0.1 and row["x/lr0"] == 0.01


def test_of_hidden_files_only_what_a_killed_run_was_writing_goes(tmp_path: Path) -> None:
    """On whichever host that was: the folder is this run's. Not what is being written, or somebody's own."""
    torn, mine = tmp_path / "weights" / ".last.pt.ab_12345.another-host.tmp", tmp_path / ".mine.tmp"
    torn.parent.mkdir()
    torn.touch()
    mine.touch()
    with atomic_write(tmp_path / "picture.png"), open_recorder(tmp_path, noplots=True):
        pass
    assert (tmp_path / "picture.png").is_file()
    assert not torn.exists() and mine.exists()


def test_event_files_of_the_run_before_go_only_where_a_new_run_begins(tmp_path: Path) -> None:
    events = tmp_path / "events.out.tfevents.1"
    with open_recorder(tmp_path, noplots=True) as recorder:
        recorder.epoch(0, EPOCH)
    events.touch()
    with open_recorder(tmp_path, noplots=True, start_epoch=1):
        assert events.is_file()
    with open_recorder(tmp_path, noplots=True):
        assert not events.exists()
    events.touch()
    (tmp_path / "results.csv").write_text("epoch,somebody's\n0,1\n")
    with pytest.raises(UserError):
        open_recorder(tmp_path, noplots=True)
    assert events.is_file()


def test_predictions_are_rendered_in_ten_epochs_of_a_run(tmp_path: Path) -> None:
    """The last epoch may be the best, of which all images are."""
    with open_recorder(tmp_path, start_epoch=1, epochs=95) as recorder:
        assert [epoch for epoch in range(95) if recorder.image_collectors(INDEX, epoch)] == [*range(0, 95, 10), 94]
        assert recorder.image_collectors(INDEX)
    with open_recorder(tmp_path / "noplots", noplots=True) as recorder:
        assert not recorder.image_collectors(INDEX) and not recorder.image_collectors(INDEX, 0)


def test_each_tracker_gets_the_predictions_of_the_epoch_however_late_it_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed, epochs = list[Path](), list[int]()
    measured, _ = summarize(accumulate([]), 1)
    monkeypatch.setattr(Loggers, "image", lambda self, tag, path, epoch: handed.append(path))
    monkeypatch.setattr(SampleImageCollector, "__len__", lambda self: 1)
    monkeypatch.setattr(
        SampleImageCollector, "write_predictions", lambda self, path, conf: path.write_text(f"{epochs[-1]}, {conf}")
    )
    with open_recorder(tmp_path, start_epoch=1, epochs=2) as recorder:
        for epoch in range(2):
            epochs.append(epoch)
            assert recorder.image_collectors(INDEX, epoch)
            recorder.epoch(epoch, dataclasses.replace(EPOCH, metrics=measured))
    assert [path.read_text() for path in handed] == ["0, 0.25", "1, 0.25"]
    assert (tmp_path / "predictions.jpg").read_text() == "1, 0.25"


def test_a_folder_or_a_row_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("a file")
    with pytest.raises(UserError, match=r"exp: not writable .*--project"):
        open_recorder(tmp_path / "exp", noplots=True)
    with open_recorder(tmp_path, noplots=True) as recorder:
        (tmp_path / "results.csv").unlink()
        (tmp_path / "results.csv").mkdir()
        with pytest.raises(UserError, match=r"not writable .*--resume"):
            recorder.epoch(0, EPOCH)
