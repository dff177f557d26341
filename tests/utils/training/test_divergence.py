"""Divergence guard: when it ends a run, when it warns, and its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tessera.models.detector import DetectionModel
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Diverged
from tessera.utils.report.observers import EpochResult
from tessera.utils.training.divergence import DivergenceGuard, least_detected
from tessera.utils.types import Metrics
from tests.data.made_index import make_index
from tests.utils.engine.trainer import SIZE, TINY, Trainer


def made_guard(
    scales: list[float] | None = None, nc: int = 2, objects: int = 8, metric: str = "fitness"
) -> DivergenceGuard:
    """A guard whose scaler shows `scales`, then 1."""
    shown = iter(scales or [])
    index = make_index([(8, 8)] * 4, classes=[[0, 1]] * 4)
    training = Trainer(cfg=TINY).training(dataclasses.replace(index, classes=index.classes[:objects]))
    criterion = DetectionModel(TINY, nc=nc).head.criterion(training.context.hyp, imgsz=SIZE)
    config = dataclasses.replace(training.context.config, metric=metric)
    training.state.precision.scaler.get_scale = lambda: next(shown, 1.0)  # type: ignore[method-assign]
    guard = DivergenceGuard()
    context = dataclasses.replace(training.context, config=config)
    guard.begin(dataclasses.replace(training, criterion=criterion, context=context))
    return guard


def ended(epoch: int, losses: list[float], metrics: Metrics | None = None) -> EpochResult:
    return EpochResult(epoch, losses, metrics, (0.1,) * 3, 1.0, 0.0, 1.0)


def skipped(step: int) -> StepFlags:
    return StepFlags(step, 0, step, skipped=1, indices=(1, 3))


def test_ten_skipped_steps_in_a_row_are_too_many_once_the_scale_is_found() -> None:
    guard = made_guard([8.0, 4.0, 2.0])
    for step in range(1, 13):
        guard.step(skipped(step))
    guard.step(StepFlags(13, 0, 13))
    for step in range(14, 23):
        guard.step(skipped(step))
    with pytest.raises(
        Diverged, match=r"step 23 \(epoch 0, batch 23\).*10 steps in a row.*last step's images: .*1.*3.*last\.pt"
    ):
        guard.step(skipped(23))


def validated(fitness: float, objects: Sequence[int]) -> Metrics:
    counts = np.array(objects)
    per_class = np.full((len(objects), 4), fitness)
    totals = (fitness,) * 4
    return Metrics(*totals, np.arange(len(objects)), per_class, counts, counts, 9, sum(objects), 0.5, np.ones(1))


@pytest.mark.parametrize(
    ("objects", "fitnesses", "said"),
    [
        ([60, 40], [0.0, 0.1, 0.305, 0.0, 0.01, 0.2, 0.02], [3, 6]),
        ([60, 40], [0.305, 0.05, 0.031, 0.3], []),  # a dip
        ([60, 40], [0.0, 0.001, 0.0, 0.002, 0.0], []),  # from scratch
        ([9, 7], [0.2, 0.0], []),  # three objects of a small set, perhaps
        ([1] * 3 + [99] * 7, [0.3, 0.0], []),  # three of its classes have one object each
        ([0, 0], [0.0, 0.0], []),
        ([60, 40], [float("nan"), 0.0, float("nan")], []),
    ],
)
def test_a_collapse_is_said_once_and_what_chance_may_do_is_not(
    objects: list[int], fitnesses: list[float], said: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    guard, other = made_guard(), made_guard(metric="recall")  # whose values say nothing of a collapse
    for epoch, fitness in enumerate(fitnesses):
        for each in (guard, other):
            each._training.state.stopper.update(epoch, fitness)
            each.epoch(ended(epoch, [0.1] * 3, validated(fitness, objects)))
    assert [text.partition(":")[0] for text in caplog.messages] == [f"Epoch {epoch}" for epoch in said]
    if said:
        assert "fitness 0.000 (0.1 mAP50 + 0.9 mAP50-95), after 0.305 of epoch 2. Lower lr0" in caplog.messages[0]


def test_the_fewest_objects_that_a_fitness_needs() -> None:
    assert least_detected(0.305, np.array([100])) == pytest.approx(30.5)
    assert least_detected(0.5, np.array([0, 10, 30])) == 10
    assert least_detected(0.75, np.array([30, 0, 10])) == 25


@pytest.mark.parametrize(
    ("nc", "losses", "objects", "said"),
    [
        (2, [0.0, 0.2, 0.0], 8, "the loss box and cls was exactly 0, although the training images have 8 objects"),
        (2, [0.0, 0.0, 0.0], 8, "the loss box and obj and cls was"),
        (2, [0.0, 0.2, 0.0], 7, ""),  # augmentation may have removed them
        (2, [1e-9, 0.2, float("nan")], 8, ""),
        (1, [0.1, 0.2, 0.0], 8, ""),  # one class has no class loss
        (1, [0.0, 0.2, 0.0], 8, "the loss box was"),
    ],
)
def test_a_loss_of_exactly_0_is_said_once(
    nc: int, losses: list[float], objects: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = made_guard(nc=nc, objects=objects)
    for epoch in range(2):
        guard.epoch(ended(epoch, losses))
    assert len(caplog.messages) == bool(said) and said in "".join(caplog.messages)
