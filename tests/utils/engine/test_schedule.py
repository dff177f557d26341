"""Schedule: equal to YOLOv5 by default, and properties of every recipe."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.utils.config import Hyp, load_hyp
from tessera.utils.engine.optimizer import Schedule

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
