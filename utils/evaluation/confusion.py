"""Which class is taken for which, and for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PairCounts(NamedTuple):
    """How often pairs of classes occurred.

    Attributes:
        cells: int64 (K,), ascending, predicted · (nc + 1) + true.
        counts: int64 (K,).
    """

    cells: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, cells: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> PairCounts:
        """Of pairs in any order, that occurred so often each, or once."""
        unique, where = np.unique(cells, return_inverse=True)
        return cls(unique, np.bincount(where, counts, len(unique)).astype(np.int64))


class ConfusionMatrix:
    """Counts of (predicted class, true class) at IoU 0.5, from those pairs that occur.

    A correct detection is paired with its object. Where an object has none, the most confident detection on it of
    another class is, unless a more confident one of its own class lies badly. All others have no partner: an object
    with one is counted once, and so is a detection; those that are ignored are not counted. So the diagonal has the
    correct detections; beside it are the objects whose class is taken for another.

    Only pairs that occur take memory: of thousands of classes a matrix would be gigabytes.
    """

    def __init__(self, nc: int, pairs: PairCounts) -> None:
        self.nc, self._pairs = nc, pairs

    @classmethod
    def joined(cls, nc: int, shares: Iterable[PairCounts]) -> ConfusionMatrix:
        """Of the images of all `shares`."""
        none = np.zeros(0, np.int64)
        cells, counts = (np.concatenate(column) for column in zip((none, none), *shares, strict=True))
        return cls(nc, PairCounts.of(cells, counts))

    @property
    def matrix(self) -> NDArray[np.int64]:
        """Counts (nc + 1, nc + 1). Rows are predicted, columns true classes; the last of each is background.

        So column nc counts detections without a partner, row nc objects without one; column c < nc adds up to the
        objects of c, row c < nc to its detections: the diagonal over these sums is recall and precision.
        """
        return self.grouped(np.arange(self.nc + 1))

    def grouped(self, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Counts (G, G) as in `matrix`, of G groups in place of classes.

        Args:
            group_of: (nc + 1,) group of each class and of background, 0 to G - 1.
        """
        cells, counts = self.pairs()
        groups = int(group_of.max()) + 1
        predicted, true = np.divmod(cells, self.nc + 1)
        summed = np.bincount(group_of[predicted] * groups + group_of[true], counts, groups**2)
        return summed.astype(np.int64).reshape(groups, groups)

    def confusions(self) -> NDArray[np.int64]:
        """How often each class was taken for another one, or another one for it: (nc,)."""
        cells, counts = self.pairs()
        predicted, true = np.divmod(cells, self.nc + 1)
        confused = (predicted != true) & (predicted < self.nc) & (true < self.nc)
        both = np.concatenate((predicted[confused], true[confused]))
        return np.bincount(both, np.tile(counts[confused], 2), self.nc).astype(np.int64)

    def pairs(self) -> PairCounts:
        """The cells of `matrix` that are not 0."""
        return self._pairs
