"""Hyperparameter search: results, interruptions, several workers, its directory and journal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optuna
import pytest
import yaml

from tessera.analysis.search import TrialObserver, hyp_of, open_directory, ranges, unread_keys
from tessera.analysis.search import run_search as evolve
from tessera.models.model_yaml import HEADS
from tessera.utils.checkpoints.run_directory import write_flags
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import Diverged, Interrupted, UserError
from tessera.utils.machine.optional_packages import MissingExtra
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex, Metrics
from tests.analysis.searches import START, curve, distance, found, nothing, search, table
from tests.data.feed.another_process import another_process
from tests.data.made_index import make_index
from tests.system.jobs import Job


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal is flushed to the disk with each of its thousands of lines; here no power goes out."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


FILES = ["evolve.csv", "hyp_evolved.yaml", "journal.log", "opt.yaml", "search.md"]


def test_a_search_finds_a_better_set_and_says_why(tmp_path: Path) -> None:
    seeds: list[int] = []

    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        assert config.evolve == 0 and not config.resume and config.nosave and config.loggers == "none"
        seeds.append(config.seed)
        return curve(config, hyp, world, folder, trial, slope=0.4)

    search(tmp_path, 40, train, epochs=6, metric="map", seed=7)
    folder = tmp_path / "exp"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    rows = table(folder)
    assert len(rows) == 40 and seeds == [7] * 40 + [8] * 4 + [9] * 4 + [10] * 4
    assert {row["end"] for row in rows} == {"measured", "pruned"}
    assert [float(rows[0][key]) for key in START.as_dict()] == list(START.as_dict().values()), "the start comes first"
    report = (folder / "search.md").read_text()
    assert "**Better: trial " in report and "40 trials: " in report
    best = Hyp.from_dict(yaml.safe_load((folder / "hyp_evolved.yaml").read_text()), "best")
    assert distance(best) < distance(START), "whichever sets the sampler chose"


def test_a_search_without_anything_to_find_says_so(tmp_path: Path) -> None:
    """Also where the start has more than five digits: it is not one of the sets that are compared with it."""
    start = dataclasses.replace(START, lr0=0.012345678)
    compared: list[Hyp] = []

    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        if config.seed == 1:
            compared.append(hyp)
        result = found(0.5 + 0.001 * config.seed if hyp == start else 0.4)
        trial.validation(0, result, result.metrics.fitness)
        return result.metrics

    evolve(TrainConfig(evolve=6, project=str(tmp_path)), start, frozenset(), World(), train)
    report = (tmp_path / "exp" / "search.md").read_text()
    assert "**Not better: no set gains more" in report and report.count("| not better |") == 3
    assert compared.count(start) == 1 and len(compared) == 4
    assert yaml.safe_load((tmp_path / "exp" / "hyp_evolved.yaml").read_text()) == start.as_dict()


def test_a_training_that_fails_three_times_counts_as_diverged(tmp_path: Path) -> None:
    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        if config.name != "trial0" and not table(tmp_path / "exp")[1:]:
            raise UserError("out of memory")
        return nothing(config, hyp, world, folder, trial)

    for _ in range(3):
        with pytest.raises(UserError, match="out of memory"):
            search(tmp_path, 3, train, exist_ok=True)
    search(tmp_path, 3, train, exist_ok=True)
    assert [row["end"] for row in table(tmp_path / "exp")] == ["measured", "diverged", "measured"]
    assert sorted(path.name for path in (tmp_path / "exp").iterdir()) == FILES


def test_a_training_that_diverges_or_has_no_finite_result_is_the_worst(tmp_path: Path) -> None:
    results = iter([Diverged("not finite"), float("nan"), 0.41])

    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        result = next(results, 0.4)
        if isinstance(result, Diverged):
            raise result
        trial.validation(0, found(result), result)
        return found(result).metrics

    search(tmp_path, 3, train)
    rows = table(tmp_path / "exp")
    assert [(row["end"], row["objective"]) for row in rows[:2]] == [("diverged", "")] * 2
    assert float(rows[2]["fitness"]) == pytest.approx(0.41) and float(rows[1]["fitness"]) == 0
    assert "3 trials: 2 diverged, 1 measured" in (tmp_path / "exp" / "search.md").read_text()


def test_what_a_search_tries_lies_around_its_start() -> None:
    kept = {"optimizer": "AdamW", "frozen_layers": 3.0, "fixed_norms": 8.0, "class_weights": '{"king": 2.0}'}
    start = dataclasses.replace(START, **kept, topk=40.0, fliplr=0.9, momentum=0.9)
    tried = ranges(start, (), optuna)
    assert not {"iou_t", "degrees", "flat_fraction", *kept} & tried.keys(), "what is off, or another model, stays"
    assert (tried["fliplr"].low, tried["fliplr"].high) == (0.45, 1)
    assert (tried["momentum"].low, tried["momentum"].high) == pytest.approx((0.8, 0.95))
    assert (tried["topk"].low, tried["topk"].high) == (20, 80) and isinstance(tried["topk"].low, int)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        child = hyp_of(start, study.ask(tried).params)
        assert Hyp.from_dict(child.as_dict(), "child") == child and child != start
        assert {key: child.as_dict()[key] for key in kept} == kept
    study.enqueue_trial({key: getattr(start, key) for key in tried})
    assert hyp_of(start, study.ask(tried).params) == start


def test_what_no_training_reads_is_not_varied() -> None:
    index = make_index([(8, 8)] * 90)

    def varied(hyp: Hyp, head: str = "DetectFree", index: DatasetIndex = index, **flags: Any) -> set[str]:
        config = TrainConfig(**{"weights": "tessera-n", "epochs": 20, **flags})
        return set(ranges(hyp, unread_keys(hyp, config, HEADS[head], index, 90), optuna))

    old = dataclasses.replace(START, copy_paste=0.1, mixup=0.1, dfl=2.0, topk=8.0, close_mosaic=0.25, layer_decay=0.9)
    of_free, of_anchor = varied(old), varied(old, "Detect")
    assert {"box", "cls", "dfl", "topk", "mosaic"} <= of_free and {"anchor_t", "obj", "obj_pw"} <= of_anchor
    assert not {"anchor_t", "obj", "obj_pw", "cls_pw", "copy_paste"} & of_free
    assert not {"dfl", "topk", "alpha", "beta"} & of_anchor
    assert "copy_paste" in varied(old, index=make_index([(8, 8)] * 90, polygons=True))
    one_class = dataclasses.replace(index, names=("a",))
    assert of_anchor - varied(old, "Detect", one_class) == {"cls", "cls_pw"} and "cls" in varied(old, index=one_class)
    still = {"mosaic", "mixup", "close_mosaic"}
    assert of_free - varied(dataclasses.replace(old, mosaic=0.0)) == of_free - varied(old, rect=True) == still
    assert of_free - varied(old, close_mosaic=3) == {"close_mosaic"}
    assert of_free - varied(old, weights="") == {"layer_decay"}
    assert "lrf" in of_free and not {"lrf", "flat_fraction", "cosine"} & varied(old, epochs=1)
    longest = dataclasses.replace(old, warmup_epochs=0.5, warmup_min_batches=1.0, warmup_fraction=0.2, cosine=0.5)
    assert {"warmup_fraction", "cosine"} <= varied(longest) and "warmup_epochs" not in varied(longest)
    assert "cosine" not in varied(longest, cos_lr=True)


def test_a_search_says_its_plan_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    evolve(TrainConfig(evolve=3, epochs=1, project=str(tmp_path)), START, frozenset({"obj"}), World(), nothing)
    plan, first, *_ = caplog.messages
    assert "Search: 3 trials, the first with the start (0 done); then the best 2 sets and the start, each with" in plan
    assert "at most 12 trainings of 1 epoch.\nVaried: lr0, lrf, " in plan and " obj," not in plan
    assert first.startswith("Trial 0 of 3")
    assert sum(" of 3" in text or text.startswith("Repeat") for text in caplog.messages) == 12
    assert len({row["obj"] for row in table(tmp_path / "exp")}) == 1
    caplog.clear()
    search(tmp_path, 4, resume="newest", epochs=1)
    assert "(3 done)" in caplog.messages[1] and " obj," not in caplog.messages[1], "as the search began"


def test_a_search_has_a_folder_of_its_own_and_only_those_who_ask_continue_it(tmp_path: Path) -> None:
    """Neither the folder of a training nor that of another search."""
    weights = tmp_path / "exp" / "weights" / "last.pt"
    weights.parent.mkdir(parents=True)
    weights.write_text("of a training")

    def fail(*_: Any, **__: Any) -> Metrics:
        raise UserError("no such dataset")

    search(tmp_path, 1)
    search(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp", "exp2", "exp3"]
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["weights"]

    search(tmp_path, 3, resume="newest", device="cpu")
    search(tmp_path, 3, resume=str(tmp_path / "exp2"))
    search(tmp_path, 4, resume=str(tmp_path / "exp2" / "evolve.csv"))
    search(tmp_path, 4, name="exp3", exist_ok=True)
    assert search(tmp_path, 4, fail, resume="newest") is None, "there is nothing left to train"
    assert [len(table(tmp_path / name)) for name in ("exp2", "exp3")] == [4, 4]

    for more, message in (
        ({"resume": str(tmp_path / "exp")}, r"exp: no directory of a search, which has a journal.log\. "),
        (
            {"resume": "newest", "epochs": 3, "imgsz": 64},
            r"this search has trainings with --epochs 100, --imgsz 640; found --epochs 3, --imgsz 64, which are not",
        ),
        ({"resume": "newest", "metric": "map"}, r"with --metric 'fitness'; found --metric 'map'"),
        ({"exist_ok": True}, r"exp is not empty; a search needs its own directory"),
    ):
        with pytest.raises(UserError, match=message):
            search(tmp_path, 9, fail, **more)
    with pytest.raises(UserError, match=r"found no .*/none/\*/journal.log"):
        search(tmp_path / "none", 1, resume="newest")
    assert weights.read_text() == "of a training"


def test_a_search_that_is_stopped_trains_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    tried: list[Hyp] = []
    stops: set[int] = set()

    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        tried.append(hyp)
        if len(tried) in stops:
            raise Interrupted("Stopped by SIGTERM.", 15, saved=True)
        return curve(config, hyp, world, folder, trial)

    search(tmp_path, 16, train, epochs=4)
    undisturbed = tried.copy()
    tried.clear()
    stops |= {1, 4, 8, 15, 22}
    for more in ({}, *[{"resume": "newest"}] * 4):
        with pytest.raises(Interrupted, match=r"Continue the search with .* --resume .*/exp2") as stopped:
            search(tmp_path, 16, train, epochs=4, **more)
        assert stopped.value.exit_code == 143 and stopped.value.saved
    search(tmp_path, 16, train, epochs=4, resume="newest")
    done = [hyp for number, hyp in enumerate(tried, 1) if number not in stops]
    assert done[:16] == undisturbed[:16] and Counter(done[16:]) == Counter(undisturbed[16:])
    assert sorted(path.name for path in (tmp_path / "exp2").iterdir()) == FILES
    assert len(table(tmp_path / "exp2")) == 16


def test_a_worker_that_is_killed_while_it_takes_the_start_does_not_lose_it(tmp_path: Path) -> None:
    killed = patch.object(optuna.trial.Trial, "_suggest", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        search(tmp_path, 2)
    search(tmp_path, 2, resume="newest")
    first = table(tmp_path / "exp")[0]
    assert [float(first[key]) for key in START.as_dict()] == list(START.as_dict().values())


def test_workers_that_begin_a_search_at_once_join_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one looks before the first one has written; on some disks it sees that one's temporary files."""
    config = TrainConfig(evolve=1, project=str(tmp_path), exist_ok=True)
    pool, second = ThreadPoolExecutor(1), []

    def write(path: Path, flags: TrainConfig) -> None:
        second.append(pool.submit(open_directory, config, World()))
        wait(second, 0.2)
        write_flags(path, flags)

    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "tmp8f3k").touch()
    monkeypatch.setattr("tessera.analysis.search.write_flags", write)
    with pool:
        folder = open_directory(config, World())
        assert [other.result() for other in second] == [folder]


def test_ranks_that_the_launcher_restarts_continue_their_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(World, "recall", lambda _, key: kept.get(key))
    monkeypatch.setattr(World, "remember", lambda _, key, value: kept.update({key: value}))
    killed: list[Hyp] = []

    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        if config.name == "trial1" and not killed:
            trial.validation(0, found(0.3), 0.3)
            killed.append(hyp)
            raise KeyboardInterrupt
        assert config.name != "trial1" or hyp == killed[0]
        return nothing(config, hyp, world, folder, trial)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, 2, train)
    search(tmp_path, 2, train)
    assert [path.name for path in tmp_path.iterdir()] == ["exp"] and len(table(tmp_path / "exp")) == 2


def test_without_optuna_one_message_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"--evolve: needs the package optuna.* uv sync --extra tune"):
        search(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{}\n", "nonsense\n", "\0\n", '{"op_code": 99, "worker_id": "a"}\n', "[1]\n"])
def test_a_journal_that_is_none(tmp_path: Path, content: str) -> None:
    search(tmp_path, 1)
    (tmp_path / "exp" / "journal.log").write_text(content)
    with pytest.raises(UserError, match=r"journal.log: not a journal of a search, .* another --name"):
        search(tmp_path, 2, resume="newest")


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    search(tmp_path, 1)
    with (tmp_path / "exp" / "journal.log").open("a") as file:
        file.write('{"op_code":8,"worker_id":"a","tri')
    search(tmp_path, 2, resume="newest")
    assert len(table(tmp_path / "exp")) == 2


def worker(tmp_path: Path, name: str) -> Job:
    command = [sys.executable, "-m", "tests.analysis.searches", str(tmp_path), "12", "0.3"]
    return Job(command, tmp_path / "said" / name)


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
    assert len(re.findall(r"Trial (\d+) was left unfinished", outcome.err)) == 1
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    storage = optuna.storages.JournalStorage(backend)
    ended, again = (optuna.load_study(study_name=n, storage=storage).trials for n in ("trials", "the best of 12"))
    assert len(ended) == len(table(folder)) == 12 and all(t.state.name in ("COMPLETE", "PRUNED") for t in ended)
    assert sorted((t.params["set"], t.params["seed"]) for t in again) == [(s, k) for s in range(4) for k in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_worker_that_is_killed_while_it_writes_holds_nothing(tmp_path: Path) -> None:
    def train(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return nothing(config, hyp, world, folder, trial)

    def killed(_: Connection) -> None:
        search(tmp_path, 1, train)

    with another_process(killed) as (process, _):
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    search(tmp_path, 1, resume="newest")
    assert sorted(path.name for path in (tmp_path / "exp").iterdir()) == FILES
