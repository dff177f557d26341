"""EarlyStopping: one decision, taken on rank 0 and broadcast."""

from __future__ import annotations

import math
from typing import Any

START = -1  # in the place of an epoch: before the first


class EarlyStopping:
    """Remembers the best epoch and says when patience has run out.

    Attributes:
        best_fitness, best_epoch: of the best epoch so far; of equal ones the later counts. −∞ and None where no epoch
            has a result: a fitness that is not finite is none. `START` where the weights that the run began with are
            better than every epoch.
        improved_epoch: the first that was as good, from which patience counts: an equal one is no better.
        patience: epochs without a better one after which to stop; 0 = never.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best_fitness = float("-inf")
        self.best_epoch: int | None = None
        self.improved_epoch: int | None = None

    def update(self, epoch: int, fitness: float | None) -> bool:
        """Take in an epoch's fitness; return whether to stop after it: never after one that was not validated."""
        if fitness is None:
            return False
        if math.isfinite(fitness) and fitness >= self.best_fitness:
            if fitness > self.best_fitness:
                self.improved_epoch = epoch
            self.best_fitness, self.best_epoch = fitness, epoch
        return self.has_run_out(epoch)

    def has_run_out(self, epoch: int) -> bool:
        """Whether patience ends with an epoch that was validated, counted from 0."""
        return self.patience > 0 and epoch - max(self.improved_epoch or 0, 0) >= self.patience

    def has_stopped(self, epochs_done: int) -> bool:
        """Whether a run of so many epochs has stopped early; never where no epoch has a result."""
        return self.best_epoch is not None and self.has_run_out(epochs_done - 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; patience belongs to the configuration."""
        epochs = {"best_epoch": self.best_epoch or 0, "improved_epoch": self.improved_epoch or 0}
        return {"best_fitness": self.best_fitness, **epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was taken; of a version that kept only the best epoch, patience counts from it."""
        self.best_fitness = float(state["best_fitness"])
        if math.isfinite(self.best_fitness):
            self.best_epoch = int(state["best_epoch"])
            self.improved_epoch = int(state.get("improved_epoch", self.best_epoch))
