"""Optimizer groups, learning rates and weight decay (SPEC: optimisation rules)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from torch import nn

from tessera.models.detector import DetectionModel
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.engine.optimizer import Schedule, accumulation, build_optimizer
from tests.utils.engine.trainer import TINY


@pytest.fixture(scope="module")
def hyp() -> Hyp:
    return load_hyp("hyp.scratch-low.yaml")


def test_groups_are_biases_weights_norms(hyp: Hyp) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    biases, weights, norms = build_optimizer(model, "SGD", hyp, 16).param_groups
    assert [len(g["params"]) for g in (biases, weights, norms)] == [2, 2, 1]
    assert norms["params"][0] is model[1].weight
    assert biases["weight_decay"] == norms["weight_decay"] == 0
    assert weights["weight_decay"] == pytest.approx(hyp.weight_decay)
    assert all(g["nesterov"] for g in (biases, weights, norms))
    attention = build_optimizer(nn.MultiheadAttention(4, 2), "SGD", hyp, 16).param_groups
    assert [len(g["params"]) for g in attention] == [2, 2, 0], "the projections' bias is one too"


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_rates_fall_with_the_distance_from_the_head(name: str, hyp: Hyp) -> None:
    """TINY has three layers below its head; each tensor is in one group, of its kind and layer."""
    model = DetectionModel(TINY, names=("a", "b"))
    model.model[0].requires_grad_(False)
    optimizer = build_optimizer(model, name, hyp, 16, layer_decay=0.5)
    schedule = Schedule(hyp, 100, 50, 16)
    schedule.apply(optimizer, 75)
    biases, weights, norms = schedule.learning_rates(75)
    assert biases != weights, "the warm-up"
    rate = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == sum(len(group["params"]) for group in optimizer.param_groups)
    decay = pytest.approx(hyp.weight_decay)
    expected = {
        id(p): (
            (biases if key.endswith("bias") else norms if ".bn." in key else weights) * 0.5 ** (3 - index),
            0 if key.endswith("bias") or ".bn." in key else decay,
        )
        for index in (1, 2, 3)
        for key, p in model.layer_parameters([index])
    }
    assert rate == expected


@pytest.mark.parametrize(
    ("nominal", "batch", "steps", "factor"),
    [
        *[(64, batch, steps, batch * steps / 64) for batch, steps in ((1, 64), (16, 4), (48, 1), (128, 1), (24, 3))],
        *[(32, 16, 2, 1), (16, 64, 1, 4), (0, 16, 1, 1)],
    ],
)
def test_accumulation_and_decay(hyp: Hyp, nominal: int, batch: int, steps: int, factor: float) -> None:
    recipe = dataclasses.replace(hyp, nominal_batch=nominal)
    assert accumulation(recipe, batch) == steps
    decay = build_optimizer(nn.Linear(2, 2), "AdamW", recipe, batch).param_groups[1]["weight_decay"]
    assert decay == pytest.approx(hyp.weight_decay * factor)


@pytest.mark.parametrize(("name", "key"), [("SGD", "momentum"), ("Adam", "betas")])
def test_apply_sets_rates_and_momentum(hyp: Hyp, name: str, key: str) -> None:
    schedule, optimizer = Schedule(hyp, 100, 50, 16), build_optimizer(nn.Linear(2, 2), name, hyp, 16)
    schedule.apply(optimizer, 75)
    assert tuple(g["lr"] for g in optimizer.param_groups) == schedule.learning_rates(75)
    assert np.ravel(optimizer.param_groups[0][key])[0] == schedule.momentum(75)
