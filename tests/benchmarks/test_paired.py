"""Figures that a campaign is judged by: paired differences, their standard errors, the table, what is left to run."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tessera.utils.config import TrainConfig
from tests.benchmarks.ladder import Asked, campaign, missing, named, parser
from tests.benchmarks.paired import Difference, Run, append_run, difference, read_runs, table


def made(arm: str, maps: Sequence[float], first_seed: int = 0, *, set: str = "cards", timed: bool = True) -> list[Run]:
    return [
        Run(arm, set, seed, "--cfg a.yaml", m, 1.5 * m, 59, 200.0, 180.0, 90.0, timed, 420, 1_768_000, 1.03, "c0ffee")
        for seed, m in enumerate(maps, start=first_seed)
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9), st.randoms())
def test_the_mean_over_its_error_is_the_statistic_of_a_paired_t_test(pairs: list[tuple[float, float]], order) -> None:
    new, old = (np.array(column).round(4) for column in zip(*pairs, strict=True))
    runs = made("new", new.tolist())
    order.shuffle(runs)
    found = difference(runs, made("old", old.tolist()), "map")
    assert found is not None and found.pairs == len(pairs)
    assert found.mean == pytest.approx((new - old).mean(), abs=1e-12)
    if found.error > 1e-9:
        assert found.mean / found.error == pytest.approx(stats.ttest_rel(new, old).statistic, rel=1e-6)


def test_only_seeds_that_both_arms_have_are_compared() -> None:
    new, old = made("new", [0.9, 0.5, 0.6]), made("old", [0.4, 0.5, 0.1], first_seed=1)
    found = difference(new, old, "map")
    assert found is not None and found.pairs == 2
    assert found.mean == pytest.approx(0.1) and found.error == pytest.approx(0.0)
    one = difference(new[:2], old, "map50")
    assert one is not None and one.mean == pytest.approx(0.15) and math.isnan(one.error)
    assert difference(new[:1], old, "map") is None


@pytest.mark.parametrize(
    ("mean", "error", "word"),
    [(0.021, 0.01, "better"), (-0.021, 0.01, "worse"), (0.019, 0.01, "equal"), (0.0, 0.0, "equal")],
)
def test_a_difference_counts_beyond_twice_its_error(mean: float, error: float, word: str) -> None:
    assert Difference(mean, error, 3).verdict.startswith(word)
    assert Difference(mean, math.nan, 1).verdict == "unknown: one seed"


def test_the_table_compares_each_set_apart_with_the_arm_that_was_asked_for() -> None:
    runs = [*made("old", [0.30, 0.32]), *made("new", [0.40, 0.44]), *made("new", [0.1], set="raccoon", timed=False)]
    text = "\n".join(table(runs))
    cards, raccoon = text.split("raccoon")
    assert "new − old, map   +0.1100 ± 0.0100 (2 paired)" in cards and "better" in cards
    assert "0.4200 ± 0.0283" in cards and "1,768,000" in cards and "200*" not in cards
    assert "0.1000 " in raccoon and "±" not in raccoon and "200*" in raccoon and "not comparable" in raccoon
    assert " − " not in raccoon, "the other arm has no run on this set"
    assert "old − new, map   -0.1100 ± 0.0100 (2 paired)" in "\n".join(table(runs, "new"))
    assert not any(" − " in line for line in table(runs, "none that ran"))


def test_runs_of_several_commits_are_told() -> None:
    first, second = made("old", [0.3, 0.4])
    assert "old: runs of several commits: c0ffee, unknown" in table([first, dataclasses.replace(second, commit=None)])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, runs = tmp_path / "results.jsonl", made("old", [0.3, 0.4])
    assert read_runs(path) == []
    for run in runs:
        append_run(path, run)
    assert read_runs(path) == runs
    append_run(path, runs[0])
    with pytest.raises(ValueError, match=r"results\.jsonl:3: .*old on cards, seed 0"):
        read_runs(path)
    path.write_text('{"arm": "old"\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:1: "):
        read_runs(path)


def test_a_campaign_does_what_is_missing_and_never_mixes_flags(tmp_path: Path) -> None:
    asked = [Asked("old", "cards", seed, "--cfg a.yaml", tmp_path, tmp_path, None, True) for seed in range(3)]
    assert [one.seed for one in missing(asked, made("old", [0.3], first_seed=1))] == [0, 2]
    with pytest.raises(ValueError, match=r"(?s)old on cards, seed 1: .*--cfg a\.yaml.*--cfg b\.yaml"):
        missing([dataclasses.replace(one, flags="--cfg b.yaml") for one in asked], made("old", [0.3], first_seed=1))


def test_a_seed_is_finished_before_the_next_and_an_arms_own_flags_win(tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir(), (tmp_path / "coco128").mkdir()
    words = [
        "--shared",
        str(tmp_path),
        "--project",
        str(tmp_path / "runs"),
        "--jobs",
        "2",
        "--sets",
        "cards",
        "coco128",
    ]
    asked = campaign(parser().parse_args([*words, "--seeds", "0", "1", "1"]), {"old": "", "long": "--epochs 90"})
    order = [(one.seed, one.set, one.arm) for one in asked]
    assert order == [(seed, name, arm) for seed in (0, 1) for name in ("cards", "coco128") for arm in ("old", "long")]
    flags = [TrainConfig(**TrainConfig.from_args(shlex.split(one.flags))) for one in asked[:4]]
    assert [config.epochs for config in flags] == [60, 90, 20, 90]
    assert [bool(config.weights) for config in flags] == [False, False, True, True]
    assert not any(one.timed for one in asked), "two at once"
    spec = yaml.safe_load(asked[0].data.read_text())
    assert spec["path"] == str(tmp_path / "cards") and spec["names"][-1] == "ace"
    with pytest.raises(ValueError, match=r"--shared .*raccoon"):
        campaign(parser().parse_args([*words, "--sets", "raccoon"]), {"old": ""})


def test_arms_have_names() -> None:
    assert named(["old=--cfg a.yaml", "new-1.5=--lr=3"]) == {"old": "--cfg a.yaml", "new-1.5": "--lr=3"}
    for wrong in (["--cfg a.yaml"], ["=--cfg a.yaml"], ["a/b=--cfg a.yaml"], ["a=", "a=--rect"]):
        with pytest.raises(ValueError, match="name=flags"):
            named(wrong)
