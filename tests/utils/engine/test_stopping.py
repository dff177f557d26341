"""When patience runs out."""

from __future__ import annotations

import pytest

from tessera.utils.engine.stopping import EarlyStopping


def test_stops_when_patience_has_run_out() -> None:
    stopper = EarlyStopping(2)
    assert [stopper.update(e, f) for e, f in enumerate([0.1, 0.3, 0.2, 0.2])] == [False, False, False, True]
    assert (stopper.best_epoch, stopper.best_fitness) == (1, 0.3)


def test_zero_patience_never_stops() -> None:
    stopper = EarlyStopping(0)
    assert not any(stopper.update(e, -e) for e in range(50))


def test_an_equal_epoch_counts_as_better_and_nan_never() -> None:
    stopper = EarlyStopping(1)
    assert not stopper.update(0, 0.0)
    assert not stopper.update(1, 0.0)
    assert stopper.update(2, float("nan"))
    assert stopper.best_epoch == 1


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


@pytest.mark.parametrize("patience", [1, 3])
def test_state_continues(patience: int) -> None:
    first = EarlyStopping(patience)
    first.update(0, 0.5)
    second = EarlyStopping(patience)
    second.load_state_dict(first.state_dict())
    assert [second.update(e, 0.1) for e in range(1, 5)] == [e >= patience for e in range(1, 5)]
