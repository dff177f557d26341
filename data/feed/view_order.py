"""The training order of views: some of one picture come side by side, so that it is decoded once for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera.data.feed.sampler import EpochOrder, repeated
from tessera.data.feed.views import ViewIndex
from tessera.utils.seeding import sample_rng

RUN = 4  # views of a picture side by side: a batch of 16 shows four pictures, where decoding one takes longest


class ViewOrder(EpochOrder):
    """The order of each epoch's views.

    Args:
        index: the views.
        batch_size, seed, imgsz, shapes_hw, repeats: as of EpochOrder.
    """

    def __init__(
        self,
        index: ViewIndex,
        batch_size: int,
        seed: int,
        imgsz: int,
        shapes_hw: NDArray[np.int64] | None = None,
        repeats: NDArray[np.float64] | None = None,
    ) -> None:
        super().__init__(index.images_per_epoch, batch_size, seed, imgsz, shapes_hw, repeats)
        self._index, self._images = index, len(index)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """As `epoch_order`, of the views that this epoch has."""
        rng = sample_rng(self.seed, epoch, 0, "order")
        views = self._index.of_epoch(self.seed, epoch)
        weights = None if self._weights is None else self._weights[views] / self._weights[views].sum()
        views = rng.permutation(views) if weights is None else rng.choice(views, len(views), p=weights)
        views = views if self._repeats is None else repeated(views, self._repeats, rng)
        return np.resize(in_runs(views, self._index.owners[views], rng), len(self) * self.batch_size)


def in_runs(views: NDArray[np.int64], owners: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Rearrange views so that up to `RUN` of one picture are side by side, and the runs in random order.

    Args:
        views: int64 (n,), shuffled.
        owners: int64 (n,), their pictures.
        rng: for the order of the runs.
    """
    by_picture = np.argsort(owners, kind="stable")
    _, starts, counts = np.unique(owners[by_picture], return_index=True, return_counts=True)
    place = np.arange(len(views)) - np.repeat(starts, counts)  # within its picture
    run = np.cumsum(place % RUN == 0) - 1
    return views[by_picture][np.argsort(rng.permutation(run[-1] + 1)[run], kind="stable")]
