"""Divergence guard: ends a run whose loss is no longer finite, and warns of one that learns nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from tessera.models.heads.criterion import Criterion
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.learning import COLLAPSE_REMEDY, IDLE_REMEDY, has_collapsed, idle_losses
from tessera.utils.engine.step import StepFlags
from tessera.utils.engine.stopping import START, EarlyStopping
from tessera.utils.errors import Diverged
from tessera.utils.text import first_of, plural
from tessera.utils.types import DatasetIndex, Metrics

log = logging.getLogger(__name__)


@dataclass
class DivergenceGuard:
    """Counter of skipped steps, which ends the run after ten in a row; and of epochs that learn nothing.

    A skipped step does not count while the GradScaler can still halve its scale.
    """

    LIMIT: ClassVar = 10
    context: RunContext
    index: DatasetIndex  # training images
    criterion: Criterion[Any]
    loss_scale: Callable[[], float]  # of the GradScaler, else 1; called after skipped steps only, as it synchronises
    _in_a_row: int = 0
    _idle: bool = False
    _collapsed: bool = False

    def note(self, flags: StepFlags) -> StepFlags:
        """Count a step if its flags were read, and return the flags.

        Raises:
            Diverged: on every rank.
        """
        if flags.step == 0:
            return flags
        if not flags.skipped:
            self._in_a_row = 0
        elif self.loss_scale() <= 1:
            self._in_a_row += 1
        if self._in_a_row < self.LIMIT:
            return flags
        by_rank = self.context.world.all_gather(flags.indices)
        images = [str(self.index.path(i)) for indices in by_rank for i in indices]
        last = self.context.folder / "weights" / "last.pt"
        raise Diverged(
            f"step {flags.step} (epoch {flags.epoch}, batch {flags.batch}): the loss or its gradient has not been "
            f"finite for {self.LIMIT} steps in a row. The last step's images: {first_of(images, 8)}. The last good "
            f"checkpoint, if one was saved: {last}. Lower lr0, or try --amp off."
        )

    def after_epoch(self, epoch: int, losses: list[float], metrics: Metrics | None, stopper: EarlyStopping) -> None:
        """Warn of the first epoch in which a loss was exactly 0, and of an epoch in which the fitness collapses.

        Args:
            losses: mean training losses of all ranks, one for each name of the criterion.
            metrics: of the validation; None without one.
            stopper: has recorded the epoch.
        """
        named, objects = dict(zip(self.criterion.names, losses, strict=True)), len(self.index.classes)
        if not self._idle and (idle := idle_losses(named, self.criterion.unused, objects)):
            self._idle = True
            log.warning(
                f"Epoch {epoch}: the loss {' and '.join(idle)} was exactly 0, although the training images have "
                f"{plural(objects, 'object')}: none is matched, and nothing is learned from it. {IDLE_REMEDY}"
            )
        if metrics is None:
            return
        was, best = self._collapsed, stopper.best_fitness
        self._collapsed = has_collapsed(metrics.fitness, best, metrics.objects_per_class)
        if self._collapsed and not was:
            of = "the initial weights" if stopper.best_epoch == START else f"epoch {stopper.best_epoch}"
            log.warning(
                f"Epoch {epoch}: the training has collapsed: fitness {metrics.fitness:.3f} (0.1 mAP50 + 0.9 mAP50-95), "
                f"after {best:.3f} of {of}. {COLLAPSE_REMEDY}"
            )
