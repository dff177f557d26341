"""Observation of a training by a search: objective per epoch, pruning, metrics."""

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
    """The end of a pruned training, on every rank."""


@dataclass
class TrialObserver:
    """Observer of the validations of one training."""

    world: World
    objective: Objective
    report: Callable[[int, float], bool]  # of an epoch and its value, on rank 0; returns whether the training ends
    metrics: Metrics | None = None  # of the last validation
    value: float = math.nan  # of the objective in the last validation, on rank 0

    def after_epoch(self, epoch: int, evaluation: Evaluation) -> bool:
        """Report the validation of an epoch; return, on every rank, whether the training is pruned."""
        self.metrics = evaluation.metrics

        def report() -> bool:
            self.value = self.objective.value(lambda metric: measure(evaluation, metric))
            return self.report(epoch, self.value)

        return self.world.run_on_main(report)

    @property
    def figures(self) -> tuple[float, ...]:
        """Fitness, precision, recall, mAP50 and mAP50-95 of the last validation; () if one is not finite."""
        if (m := self.metrics) is None:
            return ()
        figures = (m.fitness, m.precision, m.recall, m.map50, m.map)
        return figures if all(map(math.isfinite, figures)) else ()


def measure(evaluation: Evaluation, metric: Metric) -> float:
    """Return a metric of a validation, on rank 0, which has the curves.

    `recall@p=x` is the highest recall with a precision of at least x, at a threshold per class, as the mean over the
    classes; 0 for a class that never reaches x. `precision@r=x` likewise. `f1` is the mean over the classes at the best
    common threshold, `ms` the total milliseconds per image.
    """
    metrics, curves = evaluation.metrics, evaluation.curves
    if metric.at is not None:
        axes = {"recall@p": (curves.recall, curves.precision), "precision@r": (curves.precision, curves.recall)}
        raised, bound = axes[metric.name]
        return float(np.where(bound >= metric.at, raised, 0.0).max(1).mean()) if len(raised) else 0.0
    if metric.name == "f1":
        return float(curves.f1[:, curves.best].mean()) if len(curves.f1) else 0.0
    if metric.name == "ms":
        return sum(metrics.speed_ms)
    return float(getattr(metrics, metric.name))
