"""What a search sees of a training: its curve, by which it may end, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.flags.objective import Figure, Objective
from tessera.utils.ranks.world import World


class Pruned(Exception):
    """A training ended early, on every rank: others were better by this epoch."""


class Watch:
    """Looks at the validations of one training.

    Args:
        world: the ranks.
        objective: of the search.
        report: takes an epoch and its value on rank 0, and says whether the training is to end.

    Attributes:
        value: of the last validation, of the best epoch's in the end; NaN before the first. On rank 0.
        figures: fitness, precision, recall, mAP50 and mAP50-95 of the same validation; () where they are not finite.
    """

    def __init__(self, world: World, objective: Objective, report: Callable[[int, float], bool]) -> None:
        self._world, self._objective, self._report = world, objective, report
        self.value, self.figures = math.nan, tuple[float, ...]()

    def after_epoch(self, epoch: int, found: Evaluation) -> bool:
        """Take in the validation of an epoch; return, on every rank, whether the training ends here."""
        return self._world.from_main(lambda: self._report(epoch, self._note(found)))

    def at_end(self, found: Evaluation) -> None:
        """Take in the validation of the best epoch; every rank."""
        self._world.from_main(lambda: self._note(found))

    def _note(self, found: Evaluation) -> float:
        metrics = found.metrics
        figures = (metrics.fitness, metrics.precision, metrics.recall, metrics.map50, metrics.map)
        self.value = self._objective.value(lambda figure: measure(found, figure))
        self.figures = figures if all(map(math.isfinite, figures)) else ()
        return self.value


def measure(found: Evaluation, figure: Figure) -> float:
    """A figure of a validation; rank 0 alone has its curves.

    `recall@p=x` is the highest recall that has a precision of x, each class at a threshold of its own, and the mean
    over the classes; 0 for a class that never is so precise. `precision@r=x` likewise. `f1` is the mean over the
    classes at the one threshold where it is best, `ms` all milliseconds an image.
    """
    metrics, curves = found.metrics, found.curves
    if figure.at is not None:
        axes = {"recall@p": (curves.recall, curves.precision), "precision@r": (curves.precision, curves.recall)}
        raised, bound = axes[figure.name]
        return _highest(raised, bound >= figure.at)
    if figure.name == "f1":
        return float(curves.f1[:, curves.best].mean()) if len(curves.f1) else 0.0
    if figure.name == "ms":
        return sum(metrics.speed_ms)
    return float(getattr(metrics, figure.name))


def _highest(values: NDArray[np.float64], allowed: NDArray[np.bool_]) -> float:
    """Mean over the classes of the highest allowed value (C, 1000); 0 where none is, and without any class."""
    return float(np.where(allowed, values, 0.0).max(1).mean()) if len(values) else 0.0
