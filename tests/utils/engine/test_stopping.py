"""Early stopping: patience, plateaus, resumes."""

from __future__ import annotations

import pytest

from tessera.utils.engine.state import INITIAL, EarlyStopping


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
    assert (stopper.best_epoch, stopper.best_fitness) == (best, fitness[best])


@pytest.mark.parametrize("fitness", [float("nan"), float("inf"), float("-inf")])
def test_a_fitness_that_is_not_finite_is_no_result(fitness: float) -> None:
    """Not in the first epoch either, nor for the run that resumes."""
    stopper = EarlyStopping(2)
    assert not stopper.update(0, fitness) and stopper.best_epoch is None
    resumed = EarlyStopping(2)
    resumed.load_state_dict(stopper.state_dict())
    assert not resumed.update(1, 0.0) and resumed.best_epoch == 1 and resumed.best_fitness == 0
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
