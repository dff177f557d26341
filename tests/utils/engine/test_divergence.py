"""Divergence guard: when it ends a run, and its message."""

from __future__ import annotations

import pytest

from tessera.utils.engine.divergence import DivergenceGuard
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Diverged
from tests.data.made_index import make_index
from tests.utils.engine.trainer import TINY, Trainer


def made_guard(scales: list[float] | None = None) -> DivergenceGuard:
    """A guard whose scaler shows `scales`, then 1."""
    shown = iter(scales or [])
    return DivergenceGuard(Trainer(cfg=TINY).context, make_index([(8, 8)] * 4), lambda: next(shown, 1.0))


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
