"""Confusion matrix of classes and background."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of (predicted class, true class) at IoU 0.5, stored only for pairs that occur.

    A true positive is paired with its object. An object without one is paired with the most confident detection of
    another class on it, unless a more confident one of its own class is badly placed. Everything else pairs with
    background; ignored detections are not counted. So each object and each detection counts once.

    Attributes:
        nc: number of classes.
        cells: int64 (K,), ascending, predicted · (nc + 1) + true; class nc is background.
        counts: int64 (K,).
    """

    nc: int
    cells: NDArray[np.int64]
    counts: NDArray[np.int64]

    def grouped(self, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return counts (G, G), rows predicted, columns true; `group_of` (nc + 1,) maps classes, background last."""
        groups = int(group_of.max()) + 1
        predicted, true = np.divmod(self.cells, self.nc + 1)
        summed = np.bincount(group_of[predicted] * groups + group_of[true], self.counts, groups**2)
        return summed.astype(np.int64).reshape(groups, groups)

    def confusions(self) -> NDArray[np.int64]:
        """Count how often each class was confused with another, (nc,)."""
        predicted, true = np.divmod(self.cells, self.nc + 1)
        confused = (predicted != true) & (predicted < self.nc) & (true < self.nc)
        both = np.concatenate((predicted[confused], true[confused]))
        return np.bincount(both, np.tile(self.counts[confused], 2), self.nc).astype(np.int64)
