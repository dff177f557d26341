"""The training order: which rank gets which image, when.

Everything here is a pure function of (seed, epoch), known on every rank without communicating. An epoch is one global
order, cut into global batches; a rank takes its slice of each. Hence the stream of global batches is the same for any
number of ranks and workers, and it can be entered anywhere.

Legend: N images, B global batch, W ranks, K global batches of an epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tessera.data.feed.tiles import ViewIndex
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.seeding import sample_rng
from tessera.utils.types import DatasetIndex, Draw

BLOCK = 32  # places side by side in a batch whose images may meet in a mosaic
NEAR = 128  # images that may: those at the block's places in this batch and the ones before it
RUN = 4  # views of an image side by side: a batch of 16 shows four images, where decoding one takes longest


def repeated(order: NDArray[np.int64], repeats: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """As many images as `order`, (N,), has, each as often as its share says: exactly on average, else rounded.

    Systematic sampling: the shares lie end to end in the given order, and N points at equal distances, the first at
    random, take the images whose shares they fall on.
    """
    ends = np.cumsum(repeats[order])
    points = (np.arange(len(order)) + rng.random()) / len(order) * ends[-1]
    taken = np.searchsorted(ends, points, side="right").clip(max=len(order) - 1)  # a point may be rounded to the end
    return rng.permutation(order[taken])


def bucket_by_aspect(
    order: NDArray[np.int64], shapes_hw: NDArray[np.int64], batch_size: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rearrange an epoch so that each global batch holds images of like aspect, and still in random order.

    The sort by shape is stable, so images of one shape stay shuffled; then whole batches are shuffled. A batch that
    spans two shapes takes the larger side of either.

    Args:
        order: int64 (K · B,), shuffled.
        shapes_hw: int64 (N, 2), each image's own padded shape.

    Returns:
        The new order, int64 (K · B,), and the shape of each batch, int64 (K, 2).
    """
    height, width = shapes_hw[order].T
    # From the widest to the tallest in one line: of the two sides one is always the full image size.
    batches = order[np.argsort(height - width, kind="stable")].reshape(-1, batch_size)
    batches = batches[rng.permutation(len(batches))]
    return batches.reshape(-1), shapes_hw[batches].max(axis=1)


def in_runs(views: NDArray[np.int64], owners: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Rearrange shuffled views, (n,), so that up to `RUN` of one owner, (n,), are side by side, the runs at random."""
    by_owner = np.argsort(owners, kind="stable")
    _, starts, counts = np.unique(owners[by_owner], return_index=True, return_counts=True)
    place = np.arange(len(views)) - np.repeat(starts, counts)  # within its image
    run = np.cumsum(place % RUN == 0) - 1
    return views[by_owner][np.argsort(rng.permutation(run[-1] + 1)[run], kind="stable")]


def near_batches(batch_size: int) -> int:
    """Batches over which the images that may meet in a mosaic are spread, the sample's own among them."""
    return math.ceil(NEAR * _blocks(batch_size) / batch_size)


def block_of(place: int, batch_size: int) -> int:
    """The block of its global batch that `place` is in: a batch is cut into equal blocks of at most 32 places."""
    return place % batch_size * _blocks(batch_size) // batch_size


def neighbours(order: NDArray[np.int64], batch_size: int, batch: int, block: int) -> dict[int, int]:
    """The images that may meet in the mosaics of a block: those of the same block in this batch and the ones before it.

    They are 128, or a few more where blocks are not of 32; before the epoch's first batch comes its last. All this
    depends on the order, (K · B,), and the batch size alone, not on ranks or workers. Images decoded recently
    (recent.py) serve several mosaics, and a rank with whole blocks needs none but its own.

    Returns:
        Each image with its place in the order; places before the first count down from −1.
    """
    batches, blocks = len(order) // batch_size, _blocks(batch_size)
    slots = np.arange(-(-block * batch_size // blocks), -(-(block + 1) * batch_size // blocks))
    rows = np.arange(batch + 1 - min(near_batches(batch_size), batches), batch + 1)
    places = (rows[:, None] * batch_size + slots).ravel()
    return dict(zip(order[places].tolist(), places.tolist(), strict=True))


def _blocks(batch_size: int) -> int:
    return math.ceil(batch_size / BLOCK)


class EpochOrder:
    """The order of each epoch, all ranks together: every image once, then images from its start to fill the last batch.

    Args:
        length: N.
        batch_size: B, over all ranks.
        seed: the run's seed, the same on every rank.
        imgsz: side of a sample in pixels.
        shapes_hw: int64 (N, 2), each image's own padded shape; where given, batches are rectangular (`--rect`).
        repeats: float64 (N,), positive; where given, each image comes as often as its share of an epoch says.
        views: where the images are these; an epoch has some of them, and those of one image side by side.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        imgsz: int,
        shapes_hw: NDArray[np.int64] | None = None,
        repeats: NDArray[np.float64] | None = None,
        views: ViewIndex | None = None,
    ) -> None:
        assert length > 0 and batch_size > 0, (length, batch_size)
        self.length, self.batch_size, self.seed, self.imgsz = length, batch_size, seed, imgsz
        self._shapes_hw, self._repeats, self._views = shapes_hw, repeats, views
        self._weights: NDArray[np.float64] | None = None
        self._images_per_epoch = length if views is None else views.images_per_epoch

    def __len__(self) -> int:
        """Global batches of an epoch, K."""
        return -(-self._images_per_epoch // self.batch_size)

    def reweight(self, weights: NDArray[np.float64]) -> None:
        """Sample with replacement in proportion to `weights`, one an image, in an order without repeats, from now on.

        They are part of what an epoch is a function of: to enter an epoch again, set the same weights first.
        """
        assert self._repeats is None and weights.shape == (self.length,) and np.isfinite(weights).all(), weights
        assert (weights >= 0).all() and weights.sum() > 0, weights
        self._weights = weights

    def plan(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The global order of an epoch, int64 (K · B,), and the height and width of each global batch, int64 (K, 2)."""
        order = self._order(epoch)
        if self._shapes_hw is None:
            return order, np.full((len(self), 2), self.imgsz)
        return bucket_by_aspect(order, self._shapes_hw, self.batch_size, sample_rng(self.seed, epoch, 1, "order"))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        rng = sample_rng(self.seed, epoch, 0, "order")
        views, weights = self._views, self._weights
        images = np.arange(self.length) if views is None else views.of_epoch(self.seed, epoch)
        if weights is None:
            order = rng.permutation(images)
        else:
            order = rng.choice(images, len(images), p=weights[images] / weights[images].sum())
        if self._repeats is not None:
            order = repeated(order, self._repeats, rng)
        if views is not None:
            order = in_runs(order, views.owners[order], rng)
        # np.resize repeats from the start: that is the padding, also where N < B.
        return np.resize(order, len(self) * self.batch_size)


class EpochSampler(Sampler[list[Draw]]):
    """One rank's share of the training stream; the `batch_sampler` of a DataLoader.

    Each `iter()` is one epoch of this rank's batches; its first `next()` moves the sampler to the next epoch, so a
    loader that begins the next epoch early neither repeats one nor has to say so. `len()` is the whole epoch's batches.
    """

    def __init__(self, order: EpochOrder, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, (rank, size)
        check_batch_size(order.batch_size, size)
        self.order, self.rank, self.size = order, rank, size
        self._next = (0, 0)

    def __len__(self) -> int:
        return len(self.order)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Let the next `iter()` begin at batch `step` of `epoch`; the one after it is epoch + 1 from its start."""
        assert epoch >= 0 and 0 <= step <= len(self), (epoch, step, len(self))
        self._next = (epoch, step)

    def __iter__(self) -> Iterator[list[Draw]]:
        # All of this runs at the first next(): torch's loader asks for two iterators at its start, and uses the second.
        epoch, first = self._next
        self._next = (epoch + 1, 0)
        order, shapes_hw = self.order.plan(epoch)
        for batch in range(first, len(shapes_hw)):
            height, width = shapes_hw[batch].tolist()
            yield list(self._draws(order, epoch, batch, (height, width)))

    def _draws(self, order: NDArray[np.int64], epoch: int, batch: int, size_hw: tuple[int, int]) -> Iterator[Draw]:
        batch_size = self.order.batch_size
        share = batch_size // self.size
        start = batch * batch_size + self.rank * share
        for block, own in itertools.groupby(range(start, start + share), lambda place: block_of(place, batch_size)):
            near = neighbours(order, batch_size, batch, block)
            for place in own:
                yield Draw(int(order[place]), place, epoch, size_hw, near)


class ShardSampler(Sampler[list[Draw]]):
    """One rank's share of a validation: every image exactly once over all ranks, images of one shape in a batch.

    Images are sorted by shape, the largest first (if memory runs out, it does so at once), and dealt to the ranks in
    turn: counts differ by at most one, and each rank gets its part of every shape. A rank may get nothing.
    `Draw.position` is the image's place in the sorted order, `Draw.epoch` is 0.

    Args:
        rank, size: this rank among all.
        batch_size: largest batch of this rank.
        shapes: int (N, 2), height and width of each image as the model sees it; see `validation_shapes`.
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
    """Sampling weights of `--image-weights`: images with rare and badly found classes come more often.

    A class weighs (1 − mAP)² / (its objects in the dataset), an image the sum over its objects. An image without any
    weight (background, or nothing but perfectly found classes) gets the smallest positive weight among the others, so
    that none is left out. `class_maps`, (nc,), are mAP50-95 in [0, 1], 0 where not known yet.

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
    """How often `--sampling balanced` repeats each image relative to one of common classes: float64 (N,), at least 1.

    The repeat factors of LVIS (Gupta et al., arXiv 1908.03195): max(1, √(t / f)) of a class that is in the share f of
    the images; of an image that of its rarest class; 1 of one without objects. There t is 0.001, for a thousand classes
    in a hundred thousand images; here it is the mean share of the classes that occur, so that the factors do not depend
    on the size of the set, and are 1 where all classes are equally frequent.
    """
    nc = len(index.names)
    owner = np.repeat(np.arange(len(index)), np.diff(index.box_offsets))
    images, classes = np.divmod(np.unique(owner * nc + index.classes), nc)
    share = np.bincount(classes, minlength=nc) / len(index)
    factors = np.ones(len(index))
    if len(classes):
        np.maximum.at(factors, images, np.sqrt(share[share > 0].mean() / share[classes]))
    return factors
