"""Observers of a training: what happens beside it at a step, a validation, an epoch and the end.

results.csv, plots, trackers, the report and the trials of a search are observers, and so are a user's own:

    class Losses(Observer):
        def epoch(self, epoch: EpochResult) -> None:
            print(epoch.number, epoch.losses)

    uv run train.py --callbacks my_observers:Losses
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from tessera.utils.engine.state import Training
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import ConfigError
from tessera.utils.evaluation.evaluate import DetectionCollector, Evaluation
from tessera.utils.ranks.world import World
from tessera.utils.text import shown
from tessera.utils.types import Batch, Metrics
from tessera.utils.user_parts import load_part


@dataclass(frozen=True)
class EpochResult:
    """Result of an epoch, equal on every rank but for the times.

    Attributes:
        number: from 0.
        losses: training losses, means over all ranks.
        metrics: of the validation; None without one.
        rates: learning rates of biases, weights, norm weights.
        seconds, data_wait: of the epoch, and the fraction of training spent waiting for batches.
        images_per_s: trained, over all ranks; 0 if a resumed run only validated the epoch.
    """

    number: int
    losses: Sequence[float]
    metrics: Metrics | None
    rates: Sequence[float]
    seconds: float
    data_wait: float
    images_per_s: float


@dataclass(frozen=True)
class RunResult:
    """Result of a run: the validation of its best checkpoint.

    Attributes:
        best: path of the checkpoint.
        epoch: of the checkpoint, from 0.
        evaluation: whole on rank 0 alone.
    """

    best: Path
    epoch: int
    evaluation: Evaluation


class Observer:
    """Observer of a training; all methods do nothing. They are called on rank 0, or on every rank if the class says so.

    An exception ends the run. A class given as `--callbacks module:name` is instantiated once a run, without arguments.
    """

    every_rank: ClassVar[bool] = False

    def begin(self, training: Training) -> None:
        """Begin a new or resumed run, before the first step."""

    def batch(self, batch: Batch) -> None:
        """Observe a training batch of this rank, on the host, before its step."""

    def step(self, flags: StepFlags) -> None:
        """Observe a step, as soon as its flags are read: a step later on a device with a queue."""

    def collectors(self, epoch: int | None) -> list[DetectionCollector]:
        """Return functions of each batch of a validation and its detections; `epoch` is None for the best one."""
        return []

    def validation(self, epoch: int, evaluation: Evaluation, score: float) -> None:
        """Observe the validation after an epoch, from 0; `score` is the value of `--metric`."""

    def epoch(self, epoch: EpochResult) -> None:
        """End an epoch, before its checkpoint is saved."""

    def end(self, result: RunResult) -> None:
        """End the run, after the validation of its best checkpoint."""

    def close(self, *, failed: bool) -> None:
        """Close what is open, also after an error or an interruption."""


class Observers:
    """The observers of a run on this rank, in order."""

    def __init__(self, observers: Iterable[Observer], world: World) -> None:
        self._all = [observer for observer in observers if world.is_main or observer.every_rank]

    @contextmanager
    def of(self, training: Training) -> Iterator[Observers]:
        """Begin a run; at its end close the observers, the last one first."""
        with ExitStack() as stack:
            for observer in self._all:
                stack.push(partial(_close, observer))
                observer.begin(training)
            yield self

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and show each to the observers before."""
        for batch in batches:
            for observer in self._all:
                observer.batch(batch)
            yield batch

    def step(self, flags: StepFlags) -> None:
        for observer in self._all:
            observer.step(flags)

    def collectors(self, epoch: int | None) -> list[DetectionCollector]:
        return [collector for observer in self._all for collector in observer.collectors(epoch)]

    def validation(self, epoch: int, evaluation: Evaluation, score: float) -> None:
        for observer in self._all:
            observer.validation(epoch, evaluation, score)

    def epoch(self, epoch: EpochResult) -> None:
        for observer in self._all:
            observer.epoch(epoch)

    def end(self, result: RunResult) -> None:
        for observer in self._all:
            observer.end(result)


def _close(observer: Observer, kind: type[BaseException] | None, *error: object) -> None:
    observer.close(failed=kind is not None)


def own_observers(names: Sequence[str]) -> list[Observer]:
    """Return the observers of `--callbacks`.

    Raises:
        ConfigError: no such class, or one that is no observer.
    """
    observers = []
    for name in names:
        part = load_part(name, "--callbacks")
        if not (isinstance(part, type) and issubclass(part, Observer)):
            raise ConfigError(
                f"--callbacks {name}: found {shown(str(part))}, expected a class derived from Observer of "
                "tessera.utils.report.observers."
            )
        observers.append(part())
    return observers
