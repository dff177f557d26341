"""Early stopping by fitness; train.py broadcasts rank 0's decision."""

from __future__ import annotations

import math
from typing import Any

START = -1  # in place of an epoch: the initial weights


class EarlyStopping:
    """Record of the best epoch, and the decision to stop.

    Attributes:
        best_fitness, best_epoch: of the best epoch so far; the later of equal ones. −∞ and None while no epoch has a
            finite fitness. `START` if the initial weights are better than every epoch.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience  # epochs without improvement after which to stop; 0 = never
        self.best_fitness = float("-inf")
        self.best_epoch: int | None = None
        self.improved_epoch: int | None = None  # the first epoch with this fitness, from which patience counts

    def update(self, epoch: int, fitness: float | None) -> bool:
        """Record an epoch's fitness, None if it was not validated; return whether to stop after it."""
        if fitness is None:
            return False
        if math.isfinite(fitness) and fitness >= self.best_fitness:
            if fitness > self.best_fitness:
                self.improved_epoch = epoch
            self.best_fitness, self.best_epoch = fitness, epoch
        return self.has_run_out(epoch)

    def has_run_out(self, epoch: int) -> bool:
        """Return whether patience ends with a validated epoch, from 0."""
        return self.patience > 0 and epoch - max(self.improved_epoch or 0, 0) >= self.patience

    def has_stopped(self, epochs_done: int) -> bool:
        """Return whether a run of `epochs_done` epochs has stopped early."""
        return self.best_epoch is not None and self.has_run_out(epochs_done - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; patience belongs to the configuration."""
        epochs = {"best_epoch": self.best_epoch or 0, "improved_epoch": self.improved_epoch or 0}
        return {"best_fitness": self.best_fitness, **epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of `state_dict`; older files lack improved_epoch."""
        self.best_fitness = float(state["best_fitness"])
        if math.isfinite(self.best_fitness):
            self.best_epoch = int(state["best_epoch"])
            self.improved_epoch = int(state.get("improved_epoch", self.best_epoch))
