"""Observers of a run: its files, also where they cannot be written, its trackers, and a user's own."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch
import yaml

import tessera
from tessera.analysis.charts import read_results
from tessera.analysis.trackers import Trackers
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.state import Training
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import atomic_write
from tessera.utils.ranks.world import World
from tessera.utils.report.observers import EpochResult, Observer, Observers, own_observers
from tessera.utils.report.results_csv import RunFiles
from tests.data.made_index import make_index
from tests.utils.engine.trainer import TINY, Trainer

HYP = load_hyp("hyp.scratch-low.yaml")
INDEX = make_index([])
EPOCH = EpochResult(0, (0.1, 0.2, 0.3), None, (0.01, 0.01, 0.01), seconds=1.0, data_wait=0.5, images_per_s=10.0)


def made_training(run: Path, first: int = 0, hyp: Hyp = HYP, world: World | None = None, **flags: Any) -> Training:
    """A run in a folder, resumed if its first epoch is not 0."""
    config = TrainConfig(loggers="none", **flags)
    context = RunContext(config, hyp, world or World(), 64, 32, run, resumed=first > 0)
    training = Trainer(cfg=TINY).training(INDEX)
    training.state.progress.epoch = first
    return dataclasses.replace(training, context=context)


def opened(run: Path, first: int = 0, **flags: Any) -> AbstractContextManager[Observers]:
    return Observers([RunFiles(), Trackers()], World()).of(made_training(run, first, **flags))


def epoch(number: int, **values: Any) -> EpochResult:
    return dataclasses.replace(EPOCH, number=number, **values)


def test_an_epoch_that_is_run_again_replaces_its_row(tmp_path: Path) -> None:
    with opened(tmp_path) as observers:
        for number in range(3):
            observers.epoch(epoch(number))
    with opened(tmp_path, 2) as observers:
        observers.epoch(epoch(2, seconds=7.0))
    table = read_results(tmp_path / "results.csv")
    assert table["epoch"].tolist() == [0, 1, 2]
    assert table["time/epoch_s"].tolist() == [1, 1, 7]
    first, *_ = (tmp_path / "opt.yaml").read_text().splitlines()
    assert first.startswith(f"# tessera_version {tessera.__version__}, ") and first.endswith(torch.__version__)
    assert yaml.safe_load((tmp_path / "opt.yaml").read_text())["epochs"] == 100
    assert (tmp_path / "hyp.yaml").is_file()


def test_a_resume_names_the_epochs_whose_rows_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "results.csv"
    with opened(tmp_path) as observers:
        for number in range(3):
            observers.epoch(epoch(number))
    caplog.clear()
    with opened(tmp_path, 3):
        assert not caplog.messages
    path.write_text(path.read_text()[:-60])
    with opened(tmp_path, 3):
        path.unlink()
    with opened(tmp_path, 7):
        one, seven = caplog.messages
    assert "results.csv: the rows of 1 trained epoch are missing (2), also" in one
    assert "7 trained epochs are missing (0, 1, 2, 3, 4, and 2 more)" in seven


def test_the_first_epoch_says_how_long_the_others_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with opened(tmp_path, 2, epochs=10) as observers:
        for number in (2, 3):
            observers.epoch(epoch(number, seconds=30.0))
    assert [text for text in caplog.messages if "pace" in text] == ["7 more epochs at this pace: about 4 min"]


def test_an_epoch_that_a_resumed_run_only_validates_has_no_times(tmp_path: Path) -> None:
    """Those of a validation would pass for a whole epoch's."""
    with opened(tmp_path) as observers:
        observers.epoch(epoch(0, seconds=0.1, data_wait=0.0, images_per_s=0.0))
    row = pd.read_csv(tmp_path / "results.csv").iloc[0]
    assert row[["time/epoch_s", "time/data_wait", "images_per_s"]].isna().all()
    assert row["train/box_loss"] == 0.1 and row["x/lr0"] == 0.01


def test_of_hidden_files_only_what_a_killed_run_was_writing_goes(tmp_path: Path) -> None:
    """On whichever host that was: the folder is this run's. Not what is being written, or somebody's own."""
    torn, mine = tmp_path / "weights" / ".last.pt.ab_12345.another-host.tmp", tmp_path / ".mine.tmp"
    torn.parent.mkdir()
    torn.touch()
    mine.touch()
    with atomic_write(tmp_path / "picture.png"), opened(tmp_path):
        pass
    assert (tmp_path / "picture.png").is_file()
    assert not torn.exists() and mine.exists()


def test_a_folder_or_a_row_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("a file")
    with pytest.raises(UserError, match=r"exp: not writable .*--project"), opened(tmp_path / "exp"):
        pass
    with opened(tmp_path) as observers:
        (tmp_path / "results.csv").unlink()
        (tmp_path / "results.csv").mkdir()
        with pytest.raises(UserError, match=r"not writable .*--resume"):
            observers.epoch(epoch(0))


def test_trackers_get_the_optimizer_that_is_used_and_both_of_two_values_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MagicMock()
    monkeypatch.setattr("tessera.analysis.trackers.Loggers", made)
    with opened(tmp_path, hyp=dataclasses.replace(HYP, optimizer="AdamW", close_mosaic=0.25)):
        config = made.call_args.args[2]
    assert config["optimizer"] == "AdamW" and config["lr0"] == 0.01
    assert (config["close_mosaic"], config["hyp_close_mosaic"]) == (-1, 0.25)


def test_event_files_of_the_run_before_go_only_where_a_new_run_begins(tmp_path: Path) -> None:
    events = tmp_path / "events.out.tfevents.1"
    with opened(tmp_path) as observers:
        observers.epoch(EPOCH)
    events.touch()
    with opened(tmp_path, 1):
        assert events.is_file()
    with opened(tmp_path):
        assert not events.exists()
    events.touch()
    (tmp_path / "results.csv").write_text("epoch,somebody's\n0,1\n")
    with pytest.raises(UserError), opened(tmp_path):
        pass
    assert events.is_file()


class Noted(Observer):
    """An observer that notes its calls; one of rank 0 alone."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, training: Training) -> None:
        self.calls.append("begin")

    def close(self, *, failed: bool) -> None:
        self.calls.append(f"close {failed}")


class OfEveryRank(Noted):
    every_rank = True


def test_observers_are_closed_also_where_one_fails_to_begin(tmp_path: Path) -> None:
    class Failing(Noted):
        def begin(self, training: Training) -> None:
            raise ValueError

    first, failing, last = Noted(), Failing(), Noted()
    with pytest.raises(ValueError), Observers([first, failing, last], World()).of(made_training(tmp_path)):
        pass
    assert (first.calls, failing.calls, last.calls) == (["begin", "close True"], ["close True"], [])


def test_other_ranks_have_the_observers_of_every_rank_alone(tmp_path: Path) -> None:
    world, main, every = World(), Noted(), OfEveryRank()
    world.rank = 1
    with Observers([main, every], world).of(made_training(tmp_path, world=world)):
        pass
    assert (main.calls, every.calls) == ([], ["begin", "close False"])


def test_own_observers_are_classes_of_a_module() -> None:
    (made,) = own_observers(["tests.utils.report.test_observers:Noted"])
    assert type(made).__name__ == "Noted"
    with pytest.raises(
        ConfigError, match=r"--callbacks builtins:dict: found .* expected a class derived from Observer"
    ):
        own_observers(["builtins:dict"])
