"""EarlyStopping: one decision, taken on rank 0 and broadcast."""

from __future__ import annotations

from typing import Any


class EarlyStopping:
    """Remembers the best epoch and says when patience has run out.

    Attributes:
        best_fitness, best_epoch: of the best epoch so far; of equal ones the later counts.
        patience: epochs without a better one after which to stop; 0 = never.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best_fitness = float("-inf")
        self.best_epoch = 0

    def update(self, epoch: int, fitness: float) -> bool:
        """Take in an epoch's fitness; return whether to stop after it. NaN is never the best."""
        if fitness >= self.best_fitness:
            self.best_fitness, self.best_epoch = fitness, epoch
        return self.patience > 0 and epoch - self.best_epoch >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; patience belongs to the configuration."""
        return {"best_fitness": self.best_fitness, "best_epoch": self.best_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` was taken."""
        self.best_fitness, self.best_epoch = float(state["best_fitness"]), int(state["best_epoch"])
