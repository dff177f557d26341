"""Observation of a training by a search: metric per epoch, pruning."""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.ranks.world import World
from tessera.utils.report.observers import Observer
from tessera.utils.types import Metrics


class Pruned(Exception):
    """The end of a pruned training, on every rank."""


class TrialObserver(Observer):
    """Observer of the validations of one training.

    Attributes:
        metrics, value: of the last validation, and the value of `--metric`.
    """

    every_rank = True

    def __init__(self, world: World, report: Callable[[int, float], bool]) -> None:
        """`report` takes an epoch and its value on rank 0, and returns whether the training ends."""
        self._world, self._report = world, report
        self.metrics: Metrics | None = None
        self.value = math.nan

    def validation(self, epoch: int, evaluation: Evaluation, score: float) -> None:
        """Report the validation of an epoch.

        Raises:
            Pruned: on every rank, if the search ends the training.
        """
        self.metrics, self.value = evaluation.metrics, score
        if self._world.run_on_main(lambda: self._report(epoch, score)):
            raise Pruned

    @property
    def figures(self) -> tuple[float, ...]:
        """Fitness, precision, recall, mAP50 and mAP50-95 of the last validation; () if one is not finite."""
        if (m := self.metrics) is None:
            return ()
        figures = (m.fitness, m.precision, m.recall, m.map50, m.map)
        return figures if all(map(math.isfinite, figures)) else ()
