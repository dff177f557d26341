"""Optimizer: groups, own factories, and the schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


LOW = load_hyp("hyp.scratch-low.yaml")


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 400), st.booleans(), st.data())
def test_a_file_without_the_optional_keys_has_the_schedule_of_yolov5(
    batch: int, per_epoch: int, epochs: int, cosine: bool, data: st.DataObject
) -> None:
    """SPEC's optimisation rules, written out; equal to the last bit."""
    schedule = Schedule(LOW, epochs, per_epoch, batch, cosine)
    iteration = data.draw(st.integers(0, epochs * per_epoch - 1))
    warmup = max(round(3.0 * per_epoch), 100)
    e = iteration // per_epoch
    fall = (1 + math.cos(math.pi * (e / epochs))) / 2 if cosine else 1 - e / epochs
    rate = 0.01 * (fall * (1 - 0.01) + 0.01)

    def warm(at: int, start: float, end: float) -> float:
        return end if at >= warmup else (end - start) / warmup * at + start

    assert schedule.learning_rates(iteration) == (warm(iteration, 0.1, rate), *[warm(iteration, 0.0, rate)] * 2)
    assert schedule.momentum(iteration) == warm(iteration, 0.8, 0.937)
    left = per_epoch - iteration % per_epoch
    reached = [k for k in range(1, left) if k >= max(round(warm(iteration + k - 1, 1.0, 64 / batch)), 1)]
    assert schedule.window(iteration) == min([*reached, left])


RECIPES = st.builds(
    dataclasses.replace,
    st.just(LOW),
    lr0=st.floats(1e-4, 1),
    lrf=st.floats(0, 1),
    warmup_epochs=st.floats(0, 5),
    warmup_min_batches=st.floats(0, 200),
    warmup_fraction=st.floats(0, 1),
    warmup_max_fraction=st.just(0.0) | st.floats(0, 1),
    warmup_bias_lr=st.floats(0, 1),
    nominal_batch=st.sampled_from([0.0, 1.0, 16.0, 64.0, 100.0]),
    flat_fraction=st.floats(0, 0.99),
    cosine=st.floats(0, 1),
)


@given(RECIPES, st.integers(1, 300), st.booleans())
def test_the_rate_stays_then_falls_to_its_end_without_a_jump(recipe: Hyp, epochs: int, cosine: bool) -> None:
    schedule = Schedule(recipe, epochs, 10, 16, cosine)
    factors = [schedule.factor(epoch) for epoch in range(epochs + 1)]
    steepest = math.pi / 2 * (1 - recipe.lrf) / (1 - recipe.flat_fraction) / epochs
    assert factors[-1] == pytest.approx(recipe.lrf)
    for epoch, (now, later) in enumerate(itertools.pairwise(factors)):
        assert now == pytest.approx(1) or epoch > recipe.flat_fraction * epochs
        assert -1e-12 <= now - later <= steepest + 1e-12


@given(RECIPES, st.integers(1, 40), st.integers(1, 60), st.integers(1, 200))
def test_the_warm_up_is_continuous_and_its_rates_are_bounded(
    recipe: Hyp, epochs: int, per_epoch: int, batch: int
) -> None:
    schedule = Schedule(recipe, epochs, per_epoch, batch)
    warmup, drop = schedule.warmup_iterations, 0.0
    wanted = (recipe.warmup_epochs * per_epoch, recipe.warmup_min_batches, recipe.warmup_fraction * epochs * per_epoch)
    bound = recipe.warmup_max_fraction * epochs * per_epoch or math.inf
    assert abs(warmup - max(min(max(wanted), bound), 1)) <= 0.5
    before = schedule.learning_rates(0)
    for iteration in range(1, epochs * per_epoch):
        rates = schedule.learning_rates(iteration)
        if iteration % per_epoch == 0:
            epoch = iteration // per_epoch
            drop = recipe.lr0 * (schedule.factor(epoch - 1) - schedule.factor(epoch))
        else:
            drop = 0.0
        for now, earlier, start in zip(rates, before, (recipe.warmup_bias_lr, 0.0, 0.0), strict=True):
            assert 0 <= now <= max(recipe.lr0, start) + 1e-12
            assert abs(now - earlier) <= max(recipe.lr0, start) / warmup + drop + 1e-12
        before = rates


@given(RECIPES, st.integers(1, 12), st.integers(1, 60), st.integers(1, 200))
def test_steps_are_counted_as_they_are_made(recipe: Hyp, epochs: int, per_epoch: int, batch: int) -> None:
    schedule = Schedule(recipe, epochs, per_epoch, batch)
    iteration = steps = 0
    while iteration < epochs * per_epoch:
        size = schedule.window(iteration)
        assert iteration // per_epoch == (iteration + size - 1) // per_epoch, "no step reaches over an epoch"
        iteration, steps = iteration + size, steps + 1
    assert schedule.steps() == steps
    if recipe.nominal_batch <= batch:
        assert steps == epochs * per_epoch, "one step a batch"
