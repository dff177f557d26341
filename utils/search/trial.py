"""What a search sees of a training: its curve, by which it may end, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.flags.objective import Metric, Objective
from tessera.utils.ranks.world import World
from tessera.utils.types import Metrics


class Pruned(Exception):
    """A training ended early, on every rank: others were better by this epoch."""


@dataclass
class Watch:
    """Looks at the validations of one training."""

    world: World
    objective: Objective  # of the search
    report: Callable[[int, float], bool]  # takes an epoch and its value on rank 0; whether the training is to end
    metrics: Metrics | None = None  # of the last validation
    value: float = math.nan  # of the objective then; on rank 0

    def after_epoch(self, epoch: int, found: Evaluation) -> bool:
        """Take in the validation of an epoch; return, on every rank, whether the training ends here."""
        self.metrics = found.metrics

        def report() -> bool:
            self.value = self.objective.value(lambda figure: measure(found, figure))
            return self.report(epoch, self.value)

        return self.world.from_main(report)

    @property
    def figures(self) -> tuple[float, ...]:
        """Fitness, precision, recall, mAP50 and mAP50-95 of the last validation; () where they are not finite."""
        if (found := self.metrics) is None:
            return ()
        figures = (found.fitness, found.precision, found.recall, found.map50, found.map)
        return figures if all(map(math.isfinite, figures)) else ()


def measure(found: Evaluation, figure: Metric) -> float:
    """A figure of a validation; rank 0 alone has its curves.

    `recall@p=x` is the highest recall that has a precision of x, each class at a threshold of its own, and the mean
    over the classes; 0 for a class that never is so precise. `precision@r=x` likewise. `f1` is the mean over the
    classes at the one threshold where it is best, `ms` all milliseconds an image.
    """
    metrics, curves = found.metrics, found.curves
    if figure.at is not None:
        axes = {"recall@p": (curves.recall, curves.precision), "precision@r": (curves.precision, curves.recall)}
        raised, bound = axes[figure.name]
        return float(np.where(bound >= figure.at, raised, 0.0).max(1).mean()) if len(raised) else 0.0
    if figure.name == "f1":
        return float(curves.f1[:, curves.best].mean()) if len(curves.f1) else 0.0
    if figure.name == "ms":
        return sum(metrics.speed_ms)
    return float(getattr(metrics, figure.name))
