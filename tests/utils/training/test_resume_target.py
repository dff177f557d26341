"""Choice of the run to train, and its result, also after a restart by the launcher."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.analysis.trackers import Trackers
from tessera.commands import train
from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint, save_checkpoint
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.run_lock import RunLockedError, lock_run
from tessera.utils.ranks.world import World
from tessera.utils.report.console import TrainingResult
from tessera.utils.training.resume_target import TrainTarget, recall_result, remember_result, resume_target
from tests.data.feed.another_process import another_process
from tests.system.tiny import make_data
from tests.utils.checkpoints.made_state import METRICS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=8, val=4)


def command(data: Path, project: Path, **flags: Any) -> dict[str, Any]:
    fixed = {"imgsz": 32, "batch_size": 8, "workers": 0, "noplots": True, "loggers": "none", "device": "cpu"}
    return {"data": str(data), "project": str(project), "name": "night", "resume": "auto", **fixed, **flags}


def begin(given: dict[str, Any], world: World) -> TrainTarget:
    """Return the start of a training that is not finished."""
    with ExitStack() as stack:
        begun = resume_target(given, world, stack)
    assert begun is not None
    return begun


@pytest.fixture(scope="module")
def night(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("runs")
    assert train.run(**command(data, project, epochs=2, save_period=1)) is not None
    return project / "night"


@pytest.fixture
def run(night: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(night, tmp_path / "night"))


def test_a_finished_run_is_unchanged_and_resumes_with_more_epochs(data: Path, run: Path) -> None:
    before = (run / "weights" / "last.pt").read_bytes()
    assert train.run(**command(data, run.parent, epochs=2)) is None
    assert (run / "weights" / "last.pt").read_bytes() == before
    assert train.run(**command(data, run.parent, epochs=3)) is not None
    assert load_checkpoint(run / "weights" / "last.pt")["epoch"] == 3
    assert [path.name for path in run.parent.glob("night*")] == ["night"]


@pytest.mark.parametrize("by_path", [False, True])
def test_a_run_killed_in_its_last_validation_is_validated_by_the_next_start(
    data: Path, run: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    last, more = run / "weights" / "last.pt", command(data, run.parent, epochs=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trackers, "end", killed)  # after the plots
        train.run(**more)
    before = last.read_bytes()
    assert load_checkpoint(last)["epoch"] == 3 and not (run / "errors.jsonl").exists()
    again = {"resume": str(last), "device": "cpu"} if by_path else more
    assert train.run(**again) is not None
    assert (run / "errors.jsonl").is_file() and last.read_bytes() == before
    if not by_path:
        assert train.run(**again) is None
        return
    with pytest.raises(
        UserError, match=r"nothing left to train: finished epochs: 3, --epochs 3\. To .* larger --epochs"
    ):
        train.run(**again)


def test_a_run_that_has_stopped_early_is_done(data: Path, run: Path) -> None:
    last = run / "weights" / "last.pt"
    saved = load_checkpoint(last)
    saved["stopper"] = {"best_fitness": 0.5, "best_epoch": 0}
    save_checkpoint(last, saved)
    assert train.run(**command(data, run.parent, epochs=9, patience=1)) is None
    with pytest.raises(
        UserError, match=r"finished epochs: 2, stopped early by --patience 1\. To .* larger --patience, or 0"
    ):
        train.run(resume=str(last), device="cpu", epochs=9, patience=1)


def cut(path: Path) -> None:
    """Damage a file."""
    path.write_bytes(path.read_bytes()[:-1000])


class Restarted(World):
    """A rank that the launcher has started again, in a run that had saved a checkpoint."""

    def __init__(self, run: Path, size: int = 1) -> None:
        super().__init__()
        self._run, self.size = run, size

    def recall(self, key: str) -> str | None:
        return {"run": str(self._run), "saved": "yes"}.get(key)

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value


def test_a_damaged_checkpoint_gives_way_to_the_newest_whole_one(
    data: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, wanted = run / "weights", command(data, run.parent, epochs=2)
    for name in ("last.pt", "epoch1.pt"):
        cut(weights / name)
    for who, world in (("--resume auto", World()), ("Restarted by the launcher", Restarted(run))):
        caplog.clear()
        resumed = begin(wanted, world).resumed
        assert resumed is not None and resumed.checkpoint["epoch"] == 1
        (warned,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert warned.startswith(f"{who}: {weights}/last.pt: ") and f"{weights}/epoch1.pt: " in warned
        assert warned.endswith(f"Continuing from {weights}/epoch0.pt")
    assert train.run(**wanted) is not None
    assert load_checkpoint(weights / "last.pt")["epoch"] == 2


@pytest.mark.parametrize("resume", ["auto", "PATH"])
def test_a_run_is_read_once_the_process_that_trains_it_has_ended(data: Path, run: Path, resume: str) -> None:
    last, epoch0 = run / "weights" / "last.pt", run / "weights" / "epoch0.pt"
    newer = last.rename(run / "newer.pt")
    shutil.copy(epoch0, last)

    def train_further(pipe: Connection) -> None:
        with lock_run(run, World()):
            pipe.send("begun")
            time.sleep(1)
            newer.rename(last)

    given = command(data, run.parent, epochs=9) if resume == "auto" else {"resume": str(last), "epochs": 9}
    with another_process(train_further) as (_, pipe):
        assert pipe.recv() == "begun"
        begun = begin(given, World())
    assert begun.resumed is not None and begun.resumed.checkpoint["epoch"] == 2 and begun.folder == run


@pytest.mark.parametrize("left", ["damaged", "missing", "best.pt alone", "of YOLOv5", "YOLOv5's best.pt alone"])
def test_nothing_is_begun_over_the_results_of_a_run(data: Path, run: Path, left: str) -> None:
    best, last = run / "weights" / "best.pt", run / "weights" / "last.pt"
    for path in (run / "weights").iterdir():
        if left == "damaged":
            path.write_bytes(b"cut")
        elif left != "best.pt alone" or path != best:
            path.unlink()
    if "best.pt alone" in left:
        (run / "results.csv").unlink()
    if "YOLOv5" in left:  # a module, pickled whole
        torch.save({"epoch": 3, "model": torch.nn.Linear(2, 2), "optimizer": None}, best if "best" in left else last)
    why = {"damaged": f"{last}: .*", "of YOLOv5": f"{last}: .* pickled objects.*"}.get(left, "It has neither .*")
    message = (
        f"^--resume auto: the run in {run} has results but no .*starting again would overwrite.* {why} another --name"
    )
    with pytest.raises(UserError, match=message):
        train.run(**command(data, run.parent, epochs=2))
    if left == "damaged":
        with pytest.raises(UserError, match=message.replace("--resume auto", "Restarted by the launcher")):
            begin(command(data, run.parent), Restarted(run))


def test_a_folder_with_other_things_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "night" / "old").mkdir(parents=True)
    (tmp_path / "night" / "old" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"^--resume auto: .*/night is no run directory: it has .*thesis\.txt,"):
        train.run(**command(data, tmp_path))
    assert [path.name for path in (tmp_path / "night").rglob("*")] == ["old", "thesis.txt"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(data: Path, tmp_path: Path, night: Path) -> None:
    best = tmp_path / "night" / "weights" / "best.pt"  # of a fine-tuning: what it began with is its best so far
    best.parent.mkdir(parents=True)
    (tmp_path / "night" / "opt.yaml").touch()
    save_checkpoint(best, {**load_any_checkpoint(night / "weights" / "best.pt"), "epoch": 0})
    assert train.run(**command(data, tmp_path, epochs=1)) is not None
    assert [path.name for path in tmp_path.glob("night*")] == ["night"]


def test_flags_of_another_run_are_refused_in_one_message(data: Path, run: Path) -> None:
    other = {"data": "shapes.yaml", "cfg": "tessera-s.yaml", "weights": "yolov5n.pt", "freeze": 2}
    flags = "--weights 'yolov5n.pt', --cfg 'tessera-s.yaml', --data 'shapes.yaml', --freeze 2"
    has = f"--weights 'tessera-n', --cfg '', --data '{data}', --freeze 0 .*"
    message = f"^{flags} with --resume auto: the run of {run}/weights/last.pt has {has} Give another --name"
    with pytest.raises(ConfigError, match=message):
        train.run(**{**command(data, run.parent, epochs=9), **other})


def test_files_are_compared_by_path_and_on_the_first_rank(
    data: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    told: list[Any] = []

    class First(World):
        def run_on_main(self, work: Any) -> Any:
            told.append(work())
            return told[-1]

    class Second(World):
        def run_on_main(self, work: Any) -> Any:
            return told.pop(0)

    first = begin(command(Path(data.name), run.parent, epochs=9, weights="auto"), First())
    second = begin(command(Path("/elsewhere") / data.name, run.parent, epochs=9, weights="auto"), Second())
    assert [begun.config.data for begun in (first, second)] == [data.name, f"/elsewhere/{data.name}"]
    assert {begun.config.weights for begun in (first, second)} == {"tessera-n"}, "what auto was at the start"


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 8), (4, 8), (5, -1)])
def test_a_restart_keeps_the_batch_size_of_autobatch_if_the_ranks_divide_it(
    data: Path, run: Path, ranks: int, batch_size: int
) -> None:
    for given in (command(data, run.parent, batch_size=-1), TrainConfig.from_args(["--batch", "-1"])):
        config, _, resumed, _ = begin(given, Restarted(run, ranks))
        assert config.batch_size == batch_size and resumed is not None
    begun = begin(TrainConfig.from_args(["--batch", str(4 * ranks)]), Restarted(run, ranks))
    assert begun.config.batch_size == 4 * ranks


def test_a_restart_without_the_disk_of_its_run_starts_from_the_beginning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run)
    config, _, resumed, _ = begin({"batch_size": 8}, Restarted(run))
    assert resumed is None and (config.project, config.name) == (str(run.parent), run.name)
    assert f"no host has a checkpoint of {run}; the run starts from the beginning" in caplog.text


def test_a_run_without_a_name_and_a_search_are_refused(data: Path, tmp_path: Path) -> None:
    nameless = command(data, tmp_path)
    del nameless["name"]
    with pytest.raises(ConfigError, match="--resume auto without --name"):
        train.run(**nameless)
    with pytest.raises(
        ConfigError,
        match=r"^--evolve with --resume auto: .* join a search with --name and --exist-ok.*--resume DIRECTORY",
    ):
        train.run(**command(data, tmp_path, evolve=3))


def test_a_second_start_does_not_wait_for_a_run_that_it_would_replace(
    data: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_LOCK_TIMEOUT", "0.2")
    files = sorted(run.rglob("*"))
    with lock_run(run, World()):
        for given, remedy in (
            (command(data, run.parent, resume="", exist_ok=True), r"give another --name\.$"),
            ({"resume": str(run)}, r"after 0\.2 s; .* or begin a new run from it with --weights .*last\.pt"),
        ):
            with pytest.raises(RunLockedError, match=remedy):
                begin(given, World())
    assert sorted(run.rglob("*")) == files


ARRAYS = ("class_ids", "per_class", "images_per_class", "objects_per_class", "class_confidences")
MEASURED = dataclasses.replace(
    METRICS,
    precision=0.1 + 0.2,
    map50=1 / 3,
    class_ids=np.array([1]),
    per_class=np.array([[0.3, 0.5, 1 / 3, 0.25]]),
    losses=(0.5, float("nan")),
    speed_ms=(1.0, 2.0, 0.1),
    names=("cat", "dög"),
)


def test_the_result_of_a_training_is_recalled() -> None:
    kept: dict[str, str] = {}

    class Kept(World):
        def remember(self, key: str, value: str) -> None:
            kept[key] = value

        def recall(self, key: str) -> str | None:
            return kept.get(key)

    assert recall_result(Kept()) is None
    remember_result(TrainingResult(), Kept())
    assert recall_result(Kept()) == TrainingResult(), "a search in which nothing was left to do"
    for metrics in (MEASURED, dataclasses.replace(MEASURED, **{key: getattr(MEASURED, key)[:0] for key in ARRAYS})):
        ended = TrainingResult(metrics, Path("runs/exp"), "shapes.yaml", 3, 2, False)
        remember_result(ended, Kept())
        found = recall_result(Kept())
        assert found is not None and dataclasses.replace(found, metrics=metrics) == ended
        recalled = found.metrics
        assert recalled is not None and str(recalled) == str(metrics) and recalled.fitness == metrics.fitness
        for field in dataclasses.fields(metrics):
            was, now = getattr(metrics, field.name), getattr(recalled, field.name)
            assert type(was) is type(now)
            np.testing.assert_array_equal(was, now, strict=isinstance(was, np.ndarray))
