"""The divergence guard: a run whose loss stays not finite ends, and names the images of its last step."""

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
    """Counts skipped steps, and ends the run after ten in a row.

    A skipped step does not count while a GradScaler can still halve its scale: that is how it finds one that fits.
    """

    LIMIT: ClassVar = 10
    context: RunContext
    index: DatasetIndex  # images that the flags' indices refer to
    loss_scale: Callable[[], float]  # the GradScaler's, else 1; asked for after skipped steps only: reading it waits
    _in_a_row: int = 0

    def note(self, flags: StepFlags) -> StepFlags:
        """Count a step, and return its flags; flags that were not read yet do not count.

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
        shares = self.context.world.all_gather(flags.indices)
        images = [str(self.index.path(i)) for share in shares for i in share]
        last = self.context.folder / "weights" / "last.pt"
        raise Diverged(
            f"step {flags.step} (epoch {flags.epoch}, batch {flags.batch}): the loss or its gradient has not been "
            f"finite for {self.LIMIT} steps in a row. The last step's images: {first_of(images, 8)}. The last good "
            f"checkpoint: {last}, if the run came that far. Lower lr0, or try --amp off."
        )
