"""Mutations stay in range, improve on the best, and survive a stop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.errors import Diverged, Interrupted, UserError
from tessera.utils.ranks.world import World
from tessera.utils.search.evolve import HypTrial, best_trial, evolve, mutate, read_trials, write_trials
from tessera.utils.types import Metrics

START = load_hyp("hyp.scratch-low.yaml")
NONE = np.zeros(0, np.int64)
NOTHING = Metrics(0.0, 0.0, 0.0, 0.0, NONE, np.zeros((0, 4)), NONE, NONE, 0, 0, 0.0, np.zeros(0))


def made(config: TrainConfig) -> Path:
    """The folder of a training, as `train` makes it."""
    folder = Path(config.project) / config.name
    folder.mkdir(exist_ok=True)
    return folder


def trial(hyp: Hyp, fitness: float) -> HypTrial:
    return HypTrial(hyp, fitness, 0.5, 0.4, 0.3, 0.2)


def test_the_first_trial_is_the_start_and_later_ones_differ() -> None:
    rng = np.random.default_rng(0)
    assert mutate([], START, rng) == START
    child = mutate([trial(START, 0.3)], START, rng)
    assert child != START
    assert child.mosaic <= 1 and child.iou_t == START.iou_t
    assert child.degrees == 0, "what is off stays off"


def test_keys_that_may_be_left_out_change_where_the_start_has_them() -> None:
    kept = {"optimizer": "AdamW", "frozen_layers": 3.0, "fixed_norms": 8.0}
    recipe = dataclasses.replace(START, **kept, flat=0.5, nominal_batch=0.0)
    child = mutate([trial(recipe, 0.3)], recipe, np.random.default_rng(0))
    assert child.as_dict().keys() == recipe.as_dict().keys()
    assert {key: child.as_dict()[key] for key in kept} == kept, "another part of the model would be another model"
    assert child.flat != 0.5 and child.nominal_batch == 0
    counted = dataclasses.replace(START, topk=40.0)
    child = mutate([trial(counted, 0.3)], counted, np.random.default_rng(0))
    assert child.topk != 40 and child.topk.is_integer(), "cells are whole"


def test_a_search_without_them_draws_the_numbers_that_it_always_drew() -> None:
    rng, keys = np.random.default_rng(0), [key for key in START.as_dict() if key != "iou_t"]
    rng.choice(1, p=[1.0])
    factors = 1 + rng.normal(0, 0.2, len(keys)) * (rng.random(len(keys)) < 0.8)
    child = mutate([trial(START, 0.3)], START, np.random.default_rng(0))
    assert len(keys) == 27 and child.as_dict().keys() == START.as_dict().keys()
    assert child.lr0 == round(START.lr0 * factors[0], 5) != START.lr0


def test_values_stay_in_their_ranges() -> None:
    rng = np.random.default_rng(1)
    extreme = dataclasses.replace(START, fliplr=1.0, momentum=0.9999, anchor_t=1.001, perspective=0.001)
    for _ in range(50):
        child = mutate([trial(extreme, 0.1)], START, rng)
        Hyp.from_dict(child.as_dict(), "child")


def test_children_come_from_the_best() -> None:
    good, bad = dataclasses.replace(START, lr0=1.0), dataclasses.replace(START, lr0=1e-4)
    trials = [trial(bad, 0.1)] * 5 + [trial(good, 0.9)]
    rates = [mutate(trials, START, np.random.default_rng(seed)).lr0 for seed in range(20)]
    assert all(rate > 0.1 for rate in rates)
    assert best_trial(trials).hyp is good


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "evolve.csv"
    assert read_trials(path) == []
    weighted = dataclasses.replace(START, class_weights='{"a, \\"b\\"": 2.0}')
    trials = [trial(START, 0.25), trial(mutate([trial(weighted, 0.25)], START, np.random.default_rng(2)), 0.5)]
    assert trials[1].hyp.class_weights == weighted.class_weights, "a search leaves them"
    write_trials(path, trials)
    assert read_trials(path) == trials


def test_a_foreign_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "evolve.csv"
    write_trials(path, [trial(START, 0.25)])
    path.write_text(path.read_text() + "1,nonsense\n")
    with pytest.raises(UserError, match=r"evolve\.csv:3"):
        read_trials(path)


@pytest.mark.parametrize(
    "content",
    [
        "\udcff",
        "generation\n" + "1" * 200_000,
        "\0",
        'generation\n"',
        "generation,fitness\nnan,nan\n",
        "generation\n\x1b[2J",
    ],
)
def test_a_table_that_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "evolve.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    try:
        assert read_trials(path) == []
    except UserError as error:
        assert "evolve.csv:2: not a line" in str(error) and len(str(error)) < 400


@pytest.mark.parametrize("newer", ["anchors", "optimizer"])
def test_a_table_from_before_a_key(tmp_path: Path, newer: str) -> None:
    path = tmp_path / "evolve.csv"
    write_trials(path, [trial(START, 0.25)])
    rows = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(row[: rows[0].index(newer)]) + "\n" for row in rows))
    assert read_trials(path) == [trial(START, 0.25)]


def test_a_training_that_diverges_or_has_no_finite_result_counts_as_a_fitness_of_0(tmp_path: Path) -> None:
    found = iter([Diverged("not finite"), dataclasses.replace(NOTHING, map=float("nan"))])
    good = dataclasses.replace(NOTHING, map50=0.5, map=0.4)

    def train(config: TrainConfig, hyp: Hyp, world: World) -> Metrics:
        made(config)
        result = next(found, good)
        if isinstance(result, Diverged):
            raise result
        return result

    assert evolve(TrainConfig(evolve=3, project=str(tmp_path), name="search"), START, World(), train) is good
    trials = read_trials(tmp_path / "search" / "evolve.csv")
    assert [round(t.fitness, 2) for t in trials] == [0, 0, 0.41] and best_trial(trials) == trials[2]
    assert [path.name for path in (tmp_path / "search").iterdir() if path.is_dir()] == []


def lines(folder: Path) -> int:
    return len((folder / "evolve.csv").read_text().splitlines()) - 1


def test_a_search_has_a_folder_of_its_own_and_only_resume_continues_it(tmp_path: Path) -> None:
    """Neither the folder of a training nor that of another search; one that failed at once leaves none."""
    weights = tmp_path / "exp" / "weights" / "last.pt"
    weights.parent.mkdir(parents=True)
    weights.write_text("of a training")
    seen: list[TrainConfig] = []

    def train(config: TrainConfig, hyp: Hyp, world: World) -> Metrics:
        seen.append(config)
        made(config)
        return NOTHING

    def search(generations: int, **more: Any) -> None:
        evolve(TrainConfig(evolve=generations, project=str(tmp_path), **more), START, World(), train)

    def fail(*_: Any) -> Metrics:
        raise UserError("no such dataset")

    search(1)
    search(2)
    with pytest.raises(UserError, match="no such dataset"):
        evolve(TrainConfig(evolve=1, project=str(tmp_path)), START, World(), fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp", "exp2", "exp3"]
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["weights"]
    assert (lines(tmp_path / "exp2"), lines(tmp_path / "exp3")) == (1, 2)

    search(3, resume="newest", device="cpu")
    search(3, resume=str(tmp_path / "exp2"))
    search(4, resume=str(tmp_path / "exp2" / "evolve.csv"))
    assert (lines(tmp_path / "exp2"), lines(tmp_path / "exp3")) == (4, 3)
    assert not any(config.resume or config.evolve for config in seen) and len(seen) == 7

    for more, message in (
        ({"resume": str(tmp_path / "exp")}, r"exp: not the folder of a search, which has an evolve.csv"),
        ({"resume": "newest", "name": "exp", "epochs": 3}, r"its trainings had --epochs 100, now it is 3"),
        ({"exist_ok": True}, r"exp is not empty, and a search writes to a folder of its own"),
    ):
        with pytest.raises(UserError, match=message):
            search(9, **more)
    with pytest.raises(UserError, match=r"found no search, looked for .*/none/\*/evolve.csv"):
        evolve(TrainConfig(evolve=1, resume="newest", project=str(tmp_path / "none")), START, World(), train)
    assert len(seen) == 7 and weights.read_text() == "of a training"


def test_a_search_that_was_stopped_in_its_first_training_is_the_one_that_resume_continues(tmp_path: Path) -> None:
    seen: list[Path] = []

    def train(config: TrainConfig, hyp: Hyp, world: World) -> Metrics:
        seen.append(Path(config.project))
        made(config)
        if len(seen) == 2:
            raise Interrupted("Stopped by SIGTERM.", 15)
        return NOTHING

    def search(**more: Any) -> None:
        evolve(TrainConfig(evolve=1, project=str(tmp_path), **more), START, World(), train)

    search()
    with pytest.raises(Interrupted):
        search()
    with pytest.raises(UserError, match=r"exp2: its trainings had --epochs 100, now it is 3"):
        search(resume="newest", epochs=3)
    search(resume="newest")
    assert [folder.name for folder in seen] == ["exp", "exp2", "exp2"] and lines(tmp_path / "exp2") == 1


def test_ranks_that_the_launcher_restarts_continue_their_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(World, "recall", lambda _, key: kept.get(key))
    monkeypatch.setattr(World, "remember", lambda _, key, value: kept.update({key: value}))

    def train(config: TrainConfig, hyp: Hyp, world: World) -> Metrics:
        folder = made(config)
        if config.name == "generation1" and not (folder / "killed").exists():
            (folder / "killed").touch()
            raise KeyboardInterrupt
        return NOTHING

    config = TrainConfig(evolve=3, project=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        evolve(config, START, World(), train)
    evolve(config, START, World(), train)
    assert [path.name for path in tmp_path.iterdir()] == ["exp"] and lines(tmp_path / "exp") == 3
