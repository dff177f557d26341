"""Divergence guard: ends a run whose loss is no longer finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tessera.utils.engine.context import RunContext
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Diverged
from tessera.utils.text import first_of
from tessera.utils.types import DatasetIndex


@dataclass
class DivergenceGuard:
    """Counter of skipped steps, which ends the run after ten in a row.

    A skipped step does not count while the GradScaler can still halve its scale.
    """

    LIMIT: ClassVar = 10
    context: RunContext
    index: DatasetIndex  # training images
    loss_scale: Callable[[], float]  # of the GradScaler, else 1; called after skipped steps only, as it synchronises
    _in_a_row: int = 0

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
