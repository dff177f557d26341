"""Data loaders: training (prefetched across epochs, resumed at any batch) and validation; limit of bad images.

Legend: B images of this rank's batch, T objects of the batch.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tessera.data.augment.transforms import load_transforms
from tessera.data.feed.cache import ShmBudget
from tessera.data.feed.dataset import DetectionDataset, TrainDataset, ValDataset
from tessera.data.feed.decoded_cache import DecodedCache, share_decoded_cache
from tessera.data.feed.image_sizes import rect_train_shapes, rect_val_shapes
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.sampler import MOSAIC_BLOCK, EpochOrder, TrainSampler, ValSampler, mosaic_batches, repeat_factors
from tessera.data.feed.tiles import TileIndex
from tessera.data.feed.workers import (
    PREFETCH,
    batch_timeout,
    ignore_killed_workers,
    init_worker,
    kill_workers,
    reserve_workers,
)
from tessera.data.source.messages import most_undecodable
from tessera.utils.engine.context import RunContext
from tessera.utils.errors import UserError, lost_worker_error
from tessera.utils.image_size import size_hw_of
from tessera.utils.ranks.failures import delay_signals
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex

log = logging.getLogger(__name__)

_SHOWN = 5

S = TypeVar("S", TrainSampler, ValSampler)


class Loader(Generic[S]):
    """A DataLoader whose workers live from the first batch until `close`.

    With 0 `workers`, this process builds the batches. `seed`, offset by rank, is that of the workers' process-level
    generators, on which no sample depends.
    """

    def __init__(self, dataset: DetectionDataset, sampler: S, world: World, workers: int, seed: int) -> None:
        self._dataset = dataset
        self._sampler: S = sampler
        self._loader: DataLoader[Batch] | None = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=world.accelerator.pins_memory,
            worker_init_fn=init_worker,
            generator=torch.Generator().manual_seed((seed + 1 + world.rank) % 2**63),
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH if workers else None,
        )
        self._workers: list[BaseProcess] = []
        self._rank = world.rank
        self._stream: Iterator[Batch | UserError] = iter(())
        self._undecodable: set[int] = set()
        self._loaded: set[int] = set()
        self._ranks = world.size
        self._log_level = logging.WARNING if world.is_main else logging.ERROR  # warnings of other ranks are not shown

    def close(self) -> None:
        """End and join the workers. The loader yields no batches afterwards."""
        with delay_signals(), ignore_killed_workers():
            # These are the only references to torch's iterator, which joins its workers as it goes.
            self._stream = iter(())
            self._loader = None
            kill_workers(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """Start the workers at the sampler's next batch; batches prefetched before are dropped."""
        assert self._loader is not None, "the loader is closed"
        before = multiprocessing.active_children()
        self._stream = iter(self._loader)
        self._workers += [worker for worker in multiprocessing.active_children() if worker not in before]

    def _take(self) -> Batch:
        try:
            with batch_timeout(self._workers, self._rank):
                item = next(self._stream)
        except (ConnectionError, EOFError) as error:  # a worker died with a batch ready
            raise lost_worker_error("its connection broke") from error
        if isinstance(item, UserError):
            raise item
        self._loaded |= item.loaded
        for image in item.undecodable.keys() - self._undecodable:
            self._report_undecodable(image, item.undecodable[image])
        return item

    def _report_undecodable(self, image: int, why: str) -> None:
        """Count an image that does not decode, and warn of the first ones, then at every power of two."""
        self._undecodable.add(image)
        split, count, files = self._dataset.index.split, len(self._undecodable), self._dataset.store.files
        message = f"{split}: {count:,} of {files:,} images did not decode so far. {why}"
        # Each of many ranks loads a small part, of which a whole epoch counts from the start: damage may be contiguous.
        seen = max(len(self._loaded), -(-files // self._ranks))
        if count > most_undecodable(files, seen):
            raise UserError(f"{message} The dataset is damaged. Run --check-data to list all such images.")
        if count <= _SHOWN or count.bit_count() == 1:
            log.log(self._log_level, f"{message} It is skipped.")


class TrainLoader(Loader[TrainSampler]):
    """Training batches of one rank, epoch by epoch, from any batch on.

    When the last batch of an epoch is handed over, the workers start the next epoch. They prefetch it while the model
    is validated and saved. With `--image-weights` they wait, because the next epoch depends on that validation.
    """

    def __init__(self, dataset: TrainDataset, sampler: TrainSampler, context: RunContext, workers: int) -> None:
        super().__init__(dataset, sampler, context.world, workers, context.config.seed)
        self._epochs, self._read_ahead = context.config.epochs, not context.config.image_weights
        self._position: tuple[int, int] | None = None  # (epoch, number) of the next batch in the stream

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch, the same on every rank."""
        return len(self._sampler)

    def seek(self, epoch: int, number: int = 0) -> None:
        """Start the workers at batch `number` of `epoch`, before `batches` requests it."""
        self._sampler.seek(epoch, number)
        self._start()
        self._position = (epoch, number)

    def reweight(self, weights: NDArray[np.float64]) -> None:
        """Sample images in proportion to `weights` (N,), see `image_weights`, from the next epoch on."""
        self._sampler.order.reweight(weights)
        self._position = None  # drops what the workers prefetched with the old weights

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of `epoch` from `start` on; the workers start at the call, even if no batch is left.

        Raises:
            UserError: an image cannot be read, or too many do not decode.
        """
        self._continue_at(epoch, start)
        return self._rest(epoch, start)

    def _rest(self, epoch: int, start: int) -> Iterator[Batch]:
        for number in range(start, self.batches_per_epoch):
            assert self._position == (epoch, number), "another iteration has moved the stream"
            batch = self._take()
            self._position = (epoch, number + 1)
            self._continue_at(epoch, number + 1)
            yield batch

    def _continue_at(self, epoch: int, number: int) -> None:
        """Let the workers continue at `number` of `epoch`, or with the next epoch if this one has ended."""
        ended = number == self.batches_per_epoch and epoch + 1 < self._epochs
        place = (epoch + 1, 0) if ended and self._read_ahead else (epoch, number)
        if self._position != place:
            self.seek(*place)


class ValLoader(Loader[ValSampler]):
    """This rank's part of a validation set, possibly empty; each `iter()` is one pass."""

    _begun = False

    @property
    def index(self) -> DatasetIndex:
        """The whole split."""
        return self._dataset.index

    def begin(self) -> None:
        """Start the workers, before the first batch is requested."""
        self._start()
        self._begun = True

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if not self._begun:
            self.begin()
        self._begun = False
        for _ in range(len(self)):
            if batch := self._take():  # empty if none of its images decodes
                yield batch


def build_train_loader(context: RunContext, store: ImageStore, memory: ShmBudget | None = None) -> TrainLoader:
    """Open the training loader of this rank, on a store with "linear" interpolation. All ranks call this together.

    `memory` is the node's shared-memory budget; None creates one.

    Raises:
        ConfigError: the batch size is not divisible by the number of ranks.
    """
    config, index, world = context.config, store.index, context.world
    tiles = index if isinstance(index, TileIndex) else None
    repeats = repeat_factors(index) if config.sampling == "balanced" else None
    if repeats is not None:
        own = repeats[tiles.of_epoch(config.seed, 0)] if tiles is not None else repeats
        least, most = own.min() / own.mean(), own.max() / own.mean()
        log.info(f"--sampling balanced: each image is sampled {least:.2f} to {most:.2f} times per epoch")
    shapes_hw = rect_train_shapes(index.sizes_hw, context.imgsz, context.stride) if config.rect else None
    order = EpochOrder(len(index), context.batch_size, config.seed, context.imgsz, shapes_hw, repeats, tiles)
    sampler = TrainSampler(order, world.rank, world.size)
    memory = memory or ShmBudget(world)
    batch_bytes = context.rank_batch_size * math.prod(size_hw_of(context.imgsz)) * 3
    workers = reserve_workers(config.workers, batch_bytes, world, memory)
    images: ImageStore | DecodedCache = store
    if (context.mosaic_epochs > 0 or store.files < len(index)) and not store.is_cached:
        # Batches that a mosaic takes images from, and those that the fastest worker may be ahead of the slowest. Tiles
        # need the cache without mosaic too, because tiles of a batch share files.
        batches = mosaic_batches(context.batch_size) + workers * PREFETCH
        # Blocks may extend beyond the rank.
        node_images = min(context.rank_batch_size * world.local_size + 2 * MOSAIC_BLOCK, context.batch_size)
        images = share_decoded_cache(
            store, world, batch_size=context.batch_size, node_images=node_images, batches=batches
        )
    elif not store.is_cached:
        images = share_decoded_cache(store, world)
    dataset = TrainDataset(
        index, images, context.hyp, config.seed, context.mosaic_epochs, load_transforms(config.transforms)
    )
    return TrainLoader(dataset, sampler, context, workers)


def build_val_loader(
    store: ImageStore,
    world: World,
    *,
    batch_size: int,
    stride: int,
    workers: int,
    memory: ShmBudget | None = None,
    size_hw: tuple[int, int] | None = None,
    repeats: bool = False,
) -> ValLoader:
    """Open this rank's validation loader: each image goes to exactly one rank, once. All ranks call this together.

    Args:
        store: the images, opened with "area" interpolation.
        batch_size: largest batch of this rank.
        stride: sides are padded to a multiple of it.
        workers: requested workers; see `reserve_workers`.
        memory: the node's shared-memory budget; None creates one.
        size_hw: height and width that every image is padded to; None pads each image as little as possible.
        repeats: whether there are several passes, so that a small split is cached.
    """
    shapes = rect_val_shapes(store.index.sizes_hw, store.imgsz, stride)
    if size_hw is not None:
        shapes = np.broadcast_to(np.array(size_hw, np.int64), shapes.shape)
    memory = memory or ShmBudget(world)
    batch_bytes = batch_size * int(shapes.prod(axis=1).max()) * 3
    workers = reserve_workers(workers, batch_bytes, world, memory)
    sampler = ValSampler(world.rank, world.size, batch_size, shapes)
    images = share_decoded_cache(store, world) if repeats and not store.is_cached else store
    return ValLoader(ValDataset(store.index, images), sampler, world, workers, seed=0)


def _as_is(item: Any) -> Any:
    """Replace torch's collate function: the dataset already builds whole batches."""
    return item
