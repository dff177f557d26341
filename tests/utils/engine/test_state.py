"""State of a training: progress, EMA, early stopping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tessera.utils.engine.state import INITIAL, EarlyStopping, ModelEMA, Progress, ema_decay


@pytest.mark.parametrize(
    ("before", "after", "images", "done", "skipped"),
    [
        (8, 8, 100, (6, 2), 2),
        (8, 4, 100, (12, 4), 2),
        (8, 16, 100, (3, 1), 2),
        (8, 24, 100, (2, 0), 2),
        (8, 64, 100, (0, 0), 2),
        (8, 4, 100, (12, 12), 6),
        (8, 4, 45, (12, 4), 2),  # the epoch was done, and stays so
        (8, 32, 45, (2, 0), 2),
        (8, 8, 20, (3, 2), 5),  # of fewer images than before
    ],
)
def test_losses_keep_their_mean_in_batches_of_another_size(
    before: int, after: int, images: int, done: tuple[int, int], skipped: int
) -> None:
    """The sums over 6 batches of 8 images, divided by 12 batches of 4, would be half of the mean."""
    progress = Progress(torch.zeros(2))
    for _ in range(6):
        progress.advance(1, torch.tensor([3.0, 5.0]) * (skipped < 6))
    for _ in range(skipped):
        progress.skip(1)
    mean = progress.mean_losses()
    if skipped < 6:
        assert mean.tolist() == pytest.approx([18 / (6 - skipped), 30 / (6 - skipped)])
    progress.convert_batches(before, after, images)
    assert (progress.batch_in_epoch, progress.skipped_batches) == done
    assert progress.step == 6  # optimizer steps are no batches
    if progress.epoch_counted:
        assert torch.allclose(progress.mean_losses(), mean, rtol=1e-6, atol=0)
    else:
        assert progress.losses.tolist() == [0, 0]


@given(st.integers(1, 10**7))
def test_without_a_share_the_decay_is_the_ramp(updates: int) -> None:
    assert ema_decay(updates) == 0.9999 * (1 - math.exp(-updates / 2000))


@given(st.integers(1, 10**7), st.floats(1e-6, 1))
def test_with_a_share_the_average_reaches_back_over_it(updates: int, share: float) -> None:
    decay = ema_decay(updates, share)
    assert 0 < decay <= 0.9999 and decay <= ema_decay(updates + 1, share)
    assert 1 / (1 - decay) == pytest.approx(min(1 + share * updates, 10_000))


@pytest.mark.parametrize("taken", [True, torch.tensor(True)])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_average_of_parameters_and_buffers_follows_the_formula(share: float, taken: bool | torch.Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    ema = ModelEMA(model, share)
    expected = {k: v.clone().double() for k, v in model.state_dict().items()}
    for n in range(1, 6):
        model(torch.randn(2, 3, 4, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(model, taken)
        d = n / (4 + n) if share else 0.9999 * (1 - math.exp(-n / 2000))
        for key, value in model.state_dict().items():
            expected[key] = d * expected[key] + (1 - d) * value.double()
    for key, value in ema.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[key], rtol=1e-5, atol=1e-6)
    assert ema.updates == 5
    assert ema.model[1].num_batches_tracked == model[1].num_batches_tracked == 5


@pytest.mark.parametrize(
    ("patience", "fitness", "stops_after", "best"),
    [
        (2, [0.1, 0.3, 0.2, 0.2], 3, 1),
        (2, [0.1, 0.1, 0.1], 2, 2),  # of equal epochs the last is the best, but none is better than the first
        (2, [0.0, float("nan"), 0.0], 2, 2),
        (0, [-float(epoch) for epoch in range(50)], None, 0),
    ],
)
def test_stops_when_patience_has_run_out(
    patience: int, fitness: list[float], stops_after: int | None, best: int
) -> None:
    stopper = EarlyStopping(patience)
    stops = [stopper.update(epoch, value) for epoch, value in enumerate(fitness)]
    assert stops == [epoch == stops_after for epoch in range(len(fitness))]
    assert (stopper.best_epoch, stopper.best_score) == (best, fitness[best])


@pytest.mark.parametrize("fitness", [float("nan"), float("inf"), float("-inf")])
def test_a_fitness_that_is_not_finite_is_no_result(fitness: float) -> None:
    """Not in the first epoch either, nor for the run that resumes."""
    stopper = EarlyStopping(2)
    assert not stopper.update(0, fitness) and stopper.best_epoch is None
    resumed = EarlyStopping(2)
    resumed.load_state_dict(stopper.state_dict())
    assert not resumed.update(1, 0.0) and resumed.best_epoch == 1 and resumed.best_score == 0
    assert not resumed.update(2, fitness) and resumed.best_epoch == 1
    assert stopper.update(2, fitness) and stopper.best_epoch is None, "patience runs out all the same"


def test_a_plateau_ends_when_it_would_have_without_the_resume() -> None:
    first, second, of_an_earlier_version = EarlyStopping(3), EarlyStopping(3), EarlyStopping(3)
    assert [first.update(epoch, 0.4) for epoch in range(2)] == [False, False]
    second.load_state_dict(first.state_dict())
    of_an_earlier_version.load_state_dict({"best_fitness": 0.4, "best_epoch": 1})
    assert [second.update(epoch, 0.4) for epoch in (2, 3)] == [False, True] and second.best_epoch == 3
    assert [of_an_earlier_version.update(epoch, 0.4) for epoch in (2, 3, 4)] == [False, False, True]


def test_the_start_is_the_best_until_an_epoch_is_as_good() -> None:
    """Patience counts from the first epoch on; a resumed run knows it too."""
    stopper = EarlyStopping(2)
    assert not stopper.update(INITIAL, 0.5) and stopper.best_epoch == INITIAL
    assert not stopper.update(0, 0.4)
    resumed = EarlyStopping(2)
    resumed.load_state_dict(stopper.state_dict())
    assert [resumed.update(1, 0.4), resumed.update(2, 0.4)] == [False, True] and resumed.best_epoch == INITIAL
    assert not stopper.update(1, 0.5) and stopper.best_epoch == 1
