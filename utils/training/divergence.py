"""Warnings of a training that learns nothing, and its end if the loss is no longer finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tessera.utils.config import TrainConfig
from tessera.utils.engine.state import INITIAL, Training
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Diverged
from tessera.utils.report.observers import EpochResult, Observer
from tessera.utils.text import first_of, plural

log = logging.getLogger(__name__)

FEW_OBJECTS = 8  # in train: augmentation may remove fewer from all images of an epoch, whose loss is then 0
COLLAPSED = 0.1  # of the best fitness: an epoch below has lost what was learned; noise and warm-ups cost less
FEW_DETECTED = 5  # objects: in a small validation set chance alone may lose fewer
IDLE_REMEDY = (
    "The objects may be too small at this --imgsz, the anchors may fit none, or a loss of your own may be wrong."
)
COLLAPSE_REMEDY = "Lower lr0 or lengthen the warm-up (--hyp), or try --amp off."


def idle_losses(losses: Mapping[str, float], unused: frozenset[str], objects: int) -> list[str]:
    """Return the losses of an epoch that were exactly 0 although train has objects, so that nothing was matched."""
    if objects < FEW_OBJECTS:
        return []
    return [name for name, loss in losses.items() if loss == 0 and name not in unused]


def has_collapsed(fitness: float, best: float, objects_per_class: NDArray[np.int64]) -> bool:
    """Return whether the fitness of an epoch is so far below the best one that no chance explains it."""
    return fitness < COLLAPSED * best and least_detected(best, objects_per_class) >= FEW_DETECTED


def least_detected(fitness: float, objects_per_class: NDArray[np.int64]) -> float:
    """Return a lower bound of the objects that are detected in a validation with this fitness.

    The AP of a class is at most its recall, and the mean is reached with the fewest objects by the rarest classes.
    """
    counts = np.sort(objects_per_class[objects_per_class > 0])
    return float(np.interp(fitness * len(counts), np.arange(len(counts) + 1), np.append(0, counts.cumsum())))


class DivergenceGuard(Observer):
    """Counter of skipped steps, which ends the run after ten in a row; and of epochs that learn nothing.

    A skipped step does not count while the GradScaler can still halve its scale.
    """

    LIMIT: ClassVar = 10
    every_rank = True

    def begin(self, training: Training) -> None:
        self._training, self._in_a_row = training, 0
        self._idle = self._collapsed = False

    def step(self, flags: StepFlags) -> None:
        """Count a skipped step.

        Raises:
            Diverged: on every rank.
        """
        context, index = self._training.context, self._training.data.train
        if not flags.skipped:
            self._in_a_row = 0
        elif self._training.state.precision.scaler.get_scale() <= 1:  # which waits for the device
            self._in_a_row += 1
        if self._in_a_row < self.LIMIT:
            return
        by_rank = context.world.all_gather(flags.indices)
        images = [str(index.path(i)) for indices in by_rank for i in indices]
        raise Diverged(
            f"step {flags.step} (epoch {flags.epoch}, batch {flags.batch}): the loss or its gradient has not been "
            f"finite for {self.LIMIT} steps in a row. The last step's images: {first_of(images, 8)}. The last good "
            f"checkpoint, if one was saved: {context.folder / 'weights' / 'last.pt'}. Lower lr0, or try --amp off."
        )

    def epoch(self, epoch: EpochResult) -> None:
        """Warn of the first epoch in which a loss was exactly 0, and of an epoch in which the fitness collapses."""
        criterion, stopper = self._training.criterion, self._training.state.stopper
        named, objects = dict(zip(criterion.names, epoch.losses, strict=True)), len(self._training.data.train.classes)
        if not self._idle and (idle := idle_losses(named, criterion.unused, objects)):
            self._idle = True
            log.warning(
                f"Epoch {epoch.number}: the loss {' and '.join(idle)} was exactly 0, although the training images have "
                f"{plural(objects, 'object')}: none is matched, and nothing is learned from it. {IDLE_REMEDY}"
            )
        metrics = epoch.metrics
        if metrics is None or self._training.context.config.metric != TrainConfig.metric:
            return
        was, best = self._collapsed, stopper.best_score
        self._collapsed = has_collapsed(metrics.fitness, best, metrics.objects_per_class)
        if self._collapsed and not was:
            of = "the initial weights" if stopper.best_epoch == INITIAL else f"epoch {stopper.best_epoch}"
            log.warning(
                f"Epoch {epoch.number}: the training has collapsed: fitness {metrics.fitness:.3f} (0.1 mAP50 + 0.9 "
                f"mAP50-95), after {best:.3f} of {of}. {COLLAPSE_REMEDY}"
            )
