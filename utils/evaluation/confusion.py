"""Which class is taken for which, and for nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of (predicted class, true class) at IoU 0.5, from those pairs that occur.

    A correct detection is paired with its object. Where an object has none, the most confident detection on it of
    another class is, unless a more confident one of its own class lies badly. All others have no partner: an object
    with one is counted once, and so is a detection; those that are ignored are not counted. So the diagonal has the
    correct detections; beside it are the objects whose class is taken for another.

    Only pairs that occur take memory: of thousands of classes a matrix would be gigabytes.

    Attributes:
        nc: number of classes.
        cells: int64 (K,), ascending, predicted · (nc + 1) + true; class nc is background.
        counts: int64 (K,).
    """

    nc: int
    cells: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def matrix(self) -> NDArray[np.int64]:
        """Counts (nc + 1, nc + 1). Rows are predicted, columns true classes; the last of each is background.

        So column nc counts detections without a partner, row nc objects without one; column c < nc adds up to the
        objects of c, row c < nc to its detections: the diagonal over these sums is recall and precision.
        """
        return self.grouped(np.arange(self.nc + 1))

    def grouped(self, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts (G, G) as in `matrix`; `group_of` (nc + 1,) has the group of each class and of background, from 0."""
        groups = int(group_of.max()) + 1
        predicted, true = np.divmod(self.cells, self.nc + 1)
        summed = np.bincount(group_of[predicted] * groups + group_of[true], self.counts, groups**2)
        return summed.astype(np.int64).reshape(groups, groups)

    def confusions(self) -> NDArray[np.int64]:
        """How often each class was taken for another one, or another one for it: (nc,)."""
        predicted, true = np.divmod(self.cells, self.nc + 1)
        confused = (predicted != true) & (predicted < self.nc) & (true < self.nc)
        both = np.concatenate((predicted[confused], true[confused]))
        return np.bincount(both, np.tile(self.counts[confused], 2), self.nc).astype(np.int64)
