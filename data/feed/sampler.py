"""Samplers: batches of each rank (shuffled, balanced, by aspect ratio, tiled), image weights, mosaic candidates.

Everything here is a pure function of (seed, epoch), known on every rank without communication. An epoch is one global
order, cut into global batches, of which each rank takes its slice. The sequence of global batches is therefore the same
for any number of ranks and workers, and can be resumed at any batch.

Legend: N images, B global batch, W ranks, K global batches of an epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tessera.data.feed.tiles import TileIndex
from tessera.utils.image_size import ImageSize, size_hw_of
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.seeding import sample_rng
from tessera.utils.types import DatasetIndex, Draw

MOSAIC_BLOCK = 32  # adjacent positions of a batch whose images may share a mosaic
MOSAIC_POOL = 128  # such images: those at the block's positions in this batch and preceding ones
RUN = 4  # consecutive tiles of an image, which is decoded once for them


def balanced_order(
    order: NDArray[np.int64], repeats: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Resample an order (N,) to N images, each as often as its weight in `repeats` says, rounded up or down.

    Systematic sampling: the weights are laid end to end in the given order. N equidistant points with a random offset
    select the images.
    """
    ends = np.cumsum(repeats[order])
    points = (np.arange(len(order)) + rng.random()) / len(order) * ends[-1]
    taken = np.searchsorted(ends, points, side="right").clip(max=len(order) - 1)  # rounding may move a point to the end
    return rng.permutation(order[taken])


def bucket_by_aspect(
    order: NDArray[np.int64], shapes_hw: NDArray[np.int64], batch_size: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rearrange an epoch so that each global batch holds images of similar aspect ratio, in random order.

    The sort by shape is stable, so that images of one shape stay shuffled. Then whole batches are shuffled. A batch of
    two shapes takes the larger of each side.

    Args:
        order: int64 (K · B,), shuffled.
        shapes_hw: int64 (N, 2), padded shape of each image.

    Returns:
        The new order, int64 (K · B,), and the shape of each batch, int64 (K, 2).
    """
    height, width = shapes_hw[order].T
    # One side always is that of the image size, so that the difference sorts from the widest to the tallest.
    batches = order[np.argsort(height - width, kind="stable")].reshape(-1, batch_size)
    batches = batches[rng.permutation(len(batches))]
    return batches.reshape(-1), shapes_hw[batches].max(axis=1)


def group_by_image(tiles: NDArray[np.int64], owners: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Group shuffled tiles, (n,), into runs of up to `RUN` tiles with the same owner, (n,), in random order."""
    by_owner = np.argsort(owners, kind="stable")
    _, starts, counts = np.unique(owners[by_owner], return_index=True, return_counts=True)
    position = np.arange(len(tiles)) - np.repeat(starts, counts)  # within its image
    run = np.cumsum(position % RUN == 0) - 1
    return tiles[by_owner][np.argsort(rng.permutation(run[-1] + 1)[run], kind="stable")]


def mosaic_batches(batch_size: int) -> int:
    """Return the number of batches that a mosaic's images come from, including the sample's own batch."""
    return math.ceil(MOSAIC_POOL * _blocks(batch_size) / batch_size)


def mosaic_block(position: int, batch_size: int) -> int:
    """Return the block of a position: a global batch is cut into equal blocks of at most 32 positions."""
    return position % batch_size * _blocks(batch_size) // batch_size


def mosaic_candidates(order: NDArray[np.int64], batch_size: int, batch: int, block: int) -> dict[int, int]:
    """Return the images that may share a mosaic with a block: those of the same block in this batch and preceding ones.

    There are 128 images, or a few more if blocks are smaller than 32, each with its position in the order. The epoch's
    last batch precedes its first: positions before the start count down from −1. The result depends on the order,
    (K · B,), and the batch size alone. An image in the decoded cache serves several mosaics, and a rank with whole
    blocks needs only its own images.
    """
    batches, blocks = len(order) // batch_size, _blocks(batch_size)
    slots = np.arange(-(-block * batch_size // blocks), -(-(block + 1) * batch_size // blocks))
    rows = np.arange(batch + 1 - min(mosaic_batches(batch_size), batches), batch + 1)
    positions = (rows[:, None] * batch_size + slots).ravel()
    return dict(zip(order[positions].tolist(), positions.tolist(), strict=True))


def _blocks(batch_size: int) -> int:
    return math.ceil(batch_size / MOSAIC_BLOCK)


class EpochOrder:
    """The global order of each epoch: every image once, then images from its start to fill the last batch.

    Args:
        length: N.
        batch_size: B, over all ranks.
        seed: the run's seed, the same on every rank.
        imgsz: size of a sample in pixels.
        shapes_hw: int64 (N, 2), padded shape of each image, for rectangular batches (`--rect`); None = `imgsz`.
        repeats: float64 (N,), positive, relative frequency of each image; None = each once.
        tiles: index, if the images are tiles: an epoch has some of them, with tiles of one image side by side.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        imgsz: ImageSize,
        shapes_hw: NDArray[np.int64] | None = None,
        repeats: NDArray[np.float64] | None = None,
        tiles: TileIndex | None = None,
    ) -> None:
        assert length > 0 and batch_size > 0, (length, batch_size)
        self.length, self.batch_size, self.seed, self.imgsz = length, batch_size, seed, imgsz
        self._shapes_hw, self._repeats, self._tiles = shapes_hw, repeats, tiles
        self._weights: NDArray[np.float64] | None = None
        self._images_per_epoch = length if tiles is None else tiles.images_per_epoch

    def __len__(self) -> int:
        """Number of global batches of an epoch, K."""
        return -(-self._images_per_epoch // self.batch_size)

    def reweight(self, weights: NDArray[np.float64]) -> None:
        """Sample with replacement in proportion to `weights`, (N,), from now on; only without `repeats`.

        The weights determine the order of an epoch too: set the same weights before resuming it.
        """
        assert self._repeats is None and weights.shape == (self.length,) and np.isfinite(weights).all(), weights
        assert (weights >= 0).all() and weights.sum() > 0, weights
        self._weights = weights

    def plan(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the global order of an epoch, int64 (K · B,), and height and width of each batch, int64 (K, 2)."""
        order = self._order(epoch)
        if self._shapes_hw is None:
            return order, np.full((len(self), 2), size_hw_of(self.imgsz))
        return bucket_by_aspect(order, self._shapes_hw, self.batch_size, sample_rng(self.seed, epoch, 1, "order"))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        rng = sample_rng(self.seed, epoch, 0, "order")
        tiles, weights = self._tiles, self._weights
        images = np.arange(self.length) if tiles is None else tiles.of_epoch(self.seed, epoch)
        if weights is None:
            order = rng.permutation(images)
        else:
            order = rng.choice(images, len(images), p=weights[images] / weights[images].sum())
        if self._repeats is not None:
            order = balanced_order(order, self._repeats, rng)
        if tiles is not None:
            order = group_by_image(order, tiles.owners[order], rng)
        # np.resize repeats from the start, also if N < B.
        return np.resize(order, len(self) * self.batch_size)


class TrainSampler(Sampler[list[Draw]]):
    """One rank's part of the training order; the `batch_sampler` of a DataLoader.

    Each `iter()` is one epoch of this rank's batches. Its first `next()` advances the sampler to the next epoch, so
    that a loader can prefetch the next epoch. `len()` is the number of batches of a whole epoch.
    """

    def __init__(self, order: EpochOrder, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, (rank, size)
        check_batch_size(order.batch_size, size)
        self.order, self.rank, self.size = order, rank, size
        self._next = (0, 0)

    def __len__(self) -> int:
        return len(self.order)

    def seek(self, epoch: int, number: int = 0) -> None:
        """Let the next `iter()` start at batch `number` of `epoch`; the one after it is epoch + 1 from its start."""
        assert epoch >= 0 and 0 <= number <= len(self), (epoch, number, len(self))
        self._next = (epoch, number)

    def __iter__(self) -> Iterator[list[Draw]]:
        # This runs at the first next(): torch's loader creates two iterators at its start, and uses the second.
        epoch, first = self._next
        self._next = (epoch + 1, 0)
        order, shapes_hw = self.order.plan(epoch)
        for batch in range(first, len(shapes_hw)):
            height, width = shapes_hw[batch].tolist()
            yield list(self._draws(order, epoch, batch, (height, width)))

    def _draws(self, order: NDArray[np.int64], epoch: int, batch: int, size_hw: tuple[int, int]) -> Iterator[Draw]:
        batch_size = self.order.batch_size
        size = batch_size // self.size
        start = batch * batch_size + self.rank * size
        for block, own in itertools.groupby(range(start, start + size), lambda p: mosaic_block(p, batch_size)):
            near = mosaic_candidates(order, batch_size, batch, block)
            for position in own:
                yield Draw(int(order[position]), position, epoch, size_hw, near)


class ValSampler(Sampler[list[Draw]]):
    """One rank's part of a validation set: each image once over all ranks, images of one shape in a batch.

    Images are sorted by shape, the largest first, so that a lack of memory shows early. The ranks take them in
    turn: counts differ by at most one, and each rank gets its part of every shape. A rank may get no image.
    `Draw.position` is the position in the sorted order, `Draw.epoch` is 0. `shapes`, int (N, 2), are padded heights and
    widths; see `rect_val_shapes`.
    """

    def __init__(self, rank: int, size: int, batch_size: int, shapes: NDArray[np.int64]) -> None:
        assert batch_size > 0 and 0 <= rank < size, (batch_size, rank)
        length, area = len(shapes), shapes[:, 0] * shapes[:, 1]
        order = np.lexsort((np.arange(length), shapes[:, 1], shapes[:, 0], -area))
        self._draws: list[list[Draw]] = []
        for position in range(rank, length, size):
            index = int(order[position])
            draw = Draw(index, position, 0, (int(shapes[index, 0]), int(shapes[index, 1])))
            batch = self._draws[-1] if self._draws else []
            if batch and len(batch) < batch_size and batch[0].size_hw == draw.size_hw:
                batch.append(draw)
            else:
                self._draws.append([draw])

    def __len__(self) -> int:
        return len(self._draws)

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self._draws)


def image_weights(index: DatasetIndex, class_maps: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sampling weights for `--image-weights`: images with rare and poorly detected classes come more often.

    The weight of a class is (1 − mAP)² / (its objects in the dataset). The weight of an image is the sum over its
    objects; an image of weight 0 gets the smallest positive weight of the others. `class_maps`, (nc,), are mAP50-95 in
    [0, 1], 0 if unknown.

    Returns:
        float64 (N,), positive, summing to 1.
    """
    nc = len(index.names)
    difficulty = (1 - np.asarray(class_maps, np.float64)) ** 2
    assert difficulty.shape == (nc,), difficulty.shape
    class_weights = difficulty / np.maximum(np.bincount(index.classes, minlength=nc), 1)
    owner = np.repeat(np.arange(len(index)), np.diff(index.box_offsets))
    weights = np.bincount(owner, class_weights[index.classes], minlength=len(index))
    positive = weights[weights > 0]
    weights[weights <= 0] = positive.min() if len(positive) else 1.0
    return weights / weights.sum()


def repeat_factors(index: DatasetIndex) -> NDArray[np.float64]:
    """Return how often `--sampling balanced` repeats each image, relative to one of common classes: float64 (N,), ≥ 1.

    These are the repeat factors of LVIS (Gupta et al., arXiv 1908.03195): max(1, √(t / f)) for a class in the fraction
    f of the images; for an image the largest of its classes, 1 without objects. LVIS uses t = 0.001. Here t is the mean
    f of the classes that occur: the factors do not depend on the dataset's size, and are 1 if all classes are equally
    frequent.
    """
    nc = len(index.names)
    owner = np.repeat(np.arange(len(index)), np.diff(index.box_offsets))
    images, classes = np.divmod(np.unique(owner * nc + index.classes), nc)
    fraction = np.bincount(classes, minlength=nc) / len(index)
    factors = np.ones(len(index))
    if len(classes):
        np.maximum.at(factors, images, np.sqrt(fraction[fraction > 0].mean() / fraction[classes]))
    return factors
