"""Objective of a search: grammar of the formula, which is never executed as code, and its metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.evaluation.curves import Curves
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.flags.objective import METRICS, Metric, parse_objective
from tessera.utils.training.validation import metric_of
from tests.analysis.searches import MEASURED

VALUES = {"map": 0.5, "map50": 0.75, "ms": 10.0, "recall": 0.25, "recall@p": 0.125}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("map", 0.5),
        ("mAP", 0.5),
        ("map - 0.01*ms", 0.4),
        ("(map50 + recall) / 2", 0.5),
        ("-ms", -10),
        ("+map - -map", 1),
        ("recall@p=0.95", 0.125),
        ("2*recall@p = .5 + map", 0.75),
    ],
)
def test_a_formula_is_its_value(text: str, value: float) -> None:
    assert parse_objective(text).value(lambda figure: VALUES[figure.name]) == pytest.approx(value)


def test_a_division_by_a_measured_0_is_not_a_number() -> None:
    assert math.isnan(parse_objective("map / (ms - 1)").value(lambda _: 1.0))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not a formula"),
        ("map / (ms - ms)", "divides by 0"),
        ("map50-95", "mAP50-95 is called map"),
        ("maps", r"found 'maps', .* Did you mean 'map'"),
        ("map ** 2", r"found 'map \*\* 2'"),
        ("__import__('os').system('id')", "found .__import__"),
        ("map if map else ms", "found 'map if map else ms'"),
        ("[map][0]", r"found '\[map\]\[0\]'"),
        ("True * map", "found 'true'"),
        ("1e999 * map", "found '1e309'"),
        ("recall@p", "found 'recall @ p'"),
        ("recall@p=2", "found 'recall@p=2', expected a number above 0 and at most 1"),
        ("recall@p=0.9.5", "found 'recall@p=0.9.5'"),
        ("recall@q=0.5", "not a formula"),
        ("AT_7 + map", "found 'at_7'"),
        ("3", "has no metric"),
        ("map, ms", r"found '\(map, ms\)'"),
        ("map\0", "not a formula"),
        ("(" * 150 + "map" + ")" * 150, "not a formula|longer than 200"),
        ("-" * 5000 + "map", "not a formula|longer than 200"),
    ],
)
def test_all_else_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"--metric .*({sentence})"):
        parse_objective(text)


def test_objective_is_an_older_name_of_metric() -> None:
    assert TrainConfig.from_args(["--objective", "map"]) == TrainConfig.named({"objective": "map"}) == {"metric": "map"}
    with pytest.raises(ConfigError, match="found 'maps'"):
        TrainConfig(metric="maps")


def test_every_figure_is_measured() -> None:
    axis = np.linspace(0, 1, 1000)
    classes = np.arange(2)
    precision = np.stack((np.where(axis < 0.5, 0.6, 1.0), np.full(1000, 0.4)))
    recall = np.stack((np.where(axis < 0.5, 0.8, 0.5), np.full(1000, 0.9)))
    f1 = 2 * precision * recall / (precision + recall)
    curves = Curves(classes, precision, recall, f1, np.zeros((2, 101)), np.zeros(2), 600, np.full(2, 600))
    metrics = replace(MEASURED, map50=0.5, map=0.4, precision=0.7, recall=0.6, speed_ms=(1.0, 2.0, 0.5))
    found = Evaluation(metrics, curves, None, None)  # type: ignore[arg-type]
    assert [metric_of(found, Metric(name)) for name in METRICS] == pytest.approx(
        [0.41, 0.4, 0.5, 0.7, 0.6, (2 / 3 + 0.72 / 1.3) / 2, 3.5]
    )
    assert metric_of(found, Metric("recall@p", 0.95)) == pytest.approx(0.25), "the second class is never so precise"
    assert metric_of(found, Metric("recall@p", 0.5)) == pytest.approx(0.4)
    assert metric_of(found, Metric("precision@r", 0.7)) == pytest.approx(0.5)
