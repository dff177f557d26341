"""Divergence guard: when it ends a run, when it warns, and its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings
from tessera.utils.engine.divergence import DivergenceGuard
from tessera.utils.engine.learning import least_detected
from tessera.utils.engine.step import StepFlags
from tessera.utils.engine.stopping import EarlyStopping
from tessera.utils.errors import Diverged
from tessera.utils.types import Metrics
from tests.data.made_index import make_index
from tests.utils.engine.trainer import SIZE, TINY, Trainer


def made_guard(scales: list[float] | None = None, nc: int = 2) -> DivergenceGuard:
    """A guard whose scaler shows `scales`, then 1."""
    shown = iter(scales or [])
    context = Trainer(cfg=TINY).context
    criterion = DetectionModel(TINY, nc=nc).head.criterion(LossSettings.of(context.hyp, imgsz=SIZE))
    index = make_index([(8, 8)] * 4, classes=[[0, 1]] * 4)
    return DivergenceGuard(context, index, criterion, lambda: next(shown, 1.0))


def skipped(step: int) -> StepFlags:
    return StepFlags(step, 0, step, skipped=1, indices=(1, 3))


def test_ten_skipped_steps_in_a_row_are_too_many_once_the_scale_is_found() -> None:
    guard = made_guard([8.0, 4.0, 2.0])
    for step in range(1, 13):
        guard.note(skipped(step))
    guard.note(StepFlags(13, 0, 13))
    for step in range(14, 23):
        guard.note(skipped(step))
    with pytest.raises(
        Diverged, match=r"step 23 \(epoch 0, batch 23\).*10 steps in a row.*last step's images: .*1.*3.*last\.pt"
    ):
        guard.note(skipped(23))


def test_flags_that_were_not_read_say_nothing() -> None:
    """Where flags are read a step later, the first step after a checkpoint has none yet."""
    guard = made_guard()
    with pytest.raises(Diverged):
        for step in range(1, 11):
            guard.note(StepFlags())
            guard.note(skipped(step))
    assert step == 10


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
    guard, stopper = made_guard(), EarlyStopping(0)
    for epoch, fitness in enumerate(fitnesses):
        stopper.update(epoch, fitness)
        guard.after_epoch(epoch, [0.1] * 3, validated(fitness, objects), stopper)
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
    guard = made_guard(nc=nc)
    guard.index = dataclasses.replace(guard.index, classes=guard.index.classes[:objects])
    for epoch in range(2):
        guard.after_epoch(epoch, losses, None, EarlyStopping(0))
    assert len(caplog.messages) == bool(said) and said in "".join(caplog.messages)
