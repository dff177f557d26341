"""Batches of a dataset: in the samplers' order, each built whole by a worker.

Legend: B images of this rank's batch, T objects of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tessera.data.feed.dataset import DetectionDataset, TrainDataset, ValDataset
from tessera.data.feed.decoded_cache import RecentImages, share_recent, share_small
from tessera.data.feed.image_sizes import padded_shapes, validation_shapes
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.sampler import BLOCK, EpochOrder, EpochSampler, ShardSampler, near_batches, repeat_factors
from tessera.data.feed.shared_memory import SharedMemory
from tessera.data.feed.tiles import ViewIndex
from tessera.data.feed.workers import (
    PREFETCH,
    StoppedWorkers,
    affordable_workers,
    begin_worker,
    cap_workers,
    ignoring_lost_workers,
)
from tessera.data.source.messages import most_undecodable
from tessera.utils.engine.context import RunContext
from tessera.utils.errors import UserError, lost_worker
from tessera.utils.ranks.signals import signals_wait
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex

log = logging.getLogger(__name__)

_SHOWN = 5

S = TypeVar("S", EpochSampler, ShardSampler)
L = TypeVar("L", bound="Loader[Any]")


class Loader(Generic[S]):
    """A DataLoader whose workers live from the first batch until `close`.

    Args:
        dataset: builds batches.
        sampler: says which, in which order.
        world: this rank; batches come in page-locked memory where its accelerator copies from there.
        workers: worker processes; 0 builds batches in this one.
        seed: of the workers' process-level generators, offset by rank; no sample depends on them.
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
            worker_init_fn=begin_worker,
            generator=torch.Generator().manual_seed((seed + 1 + world.rank) % 2**63),
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH if workers else None,
        )
        self._stopped = StoppedWorkers(world.rank)
        self._stream: Iterator[Batch | UserError] = iter(())
        self._left_out: set[int] = set()
        self._loaded: set[int] = set()
        self._ranks = world.size
        self._log_level = logging.WARNING if world.is_main else logging.ERROR  # other ranks' warnings are not shown

    def close(self) -> None:
        """End and join the workers. The loader gives no batches afterwards."""
        with signals_wait(), ignoring_lost_workers():
            # These are the only references to torch's iterator, which joins its workers as it goes.
            self._stream = iter(())
            self._loader = None
            self._stopped.close()

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """Let the workers begin with what the sampler gives next; what they prepared before is dropped."""
        assert self._loader is not None, "the loader is closed"
        with self._stopped.adding_started_workers():
            self._stream = iter(self._loader)

    def _take(self) -> Batch:
        try:
            with self._stopped.waiting():
                item = next(self._stream)
        except (ConnectionError, EOFError) as error:  # a worker died with a batch ready
            raise lost_worker("its connection broke") from error
        if isinstance(item, UserError):
            raise item
        self._loaded |= item.loaded
        for image in item.left_out.keys() - self._left_out:
            self._leave_out(image, item.left_out[image])
        return item

    def _leave_out(self, image: int, why: str) -> None:
        """Count an image that does not decode, and warn: of the first ones each, then at every power of two."""
        self._left_out.add(image)
        split, count, files = self._dataset.index.split, len(self._left_out), self._dataset.store.files
        found = f"{split}: {count:,} of {files:,} images did not decode so far. {why}"
        # Of many ranks, each meets a small part. A whole epoch of it counts from the start: damage may come in a row.
        met = max(len(self._loaded), -(-files // self._ranks))
        if count > most_undecodable(files, met):
            raise UserError(f"{found} With so many, the dataset is damaged; --check-data names them all.")
        if count <= _SHOWN or count.bit_count() == 1:
            log.log(self._log_level, f"{found} It is left out.")


class TrainLoader(Loader[EpochSampler]):
    """The training stream of one rank, an epoch at a time, from any batch on.

    When the last batch of an epoch is handed over, the workers begin the next epoch, so that they do not idle while
    the model is validated and saved. Not so under `--image-weights`: there the next epoch depends on that validation.
    """

    def __init__(self, dataset: TrainDataset, sampler: EpochSampler, run: RunContext, workers: int) -> None:
        super().__init__(dataset, sampler, run.world, workers, run.config.seed)
        self._epochs, self._read_ahead = run.config.epochs, not run.config.image_weights
        self._position: tuple[int, int] | None = None  # (epoch, step) of the next batch in the stream

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return len(self._sampler)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Let the workers begin at batch `step` of `epoch` now, before `batches` asks for it."""
        self._sampler.seek(epoch, step)
        self._start()
        self._position = (epoch, step)

    def reweight(self, weights: NDArray[np.float64]) -> None:
        """Sample images in proportion to `weights` (N,), see `image_weights`, from the next epoch on."""
        self._sampler.order.reweight(weights)
        self._position = None  # what the workers prepared with the old weights is dropped

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1 … of `epoch`; the workers begin at the call, also where none of these is left.

        Raises:
            UserError: an image cannot be read, or so many do not decode that the dataset is damaged.
        """
        self._continue_at(epoch, start)
        return self._rest(epoch, start)

    def _rest(self, epoch: int, start: int) -> Iterator[Batch]:
        for step in range(start, self.batches_per_epoch):
            assert self._position == (epoch, step), "another iteration has moved the stream"
            batch = self._take()
            self._position = (epoch, step + 1)
            self._continue_at(epoch, step + 1)
            yield batch

    def _continue_at(self, epoch: int, step: int) -> None:
        """Let the workers go on at `step` of `epoch`, or with the next epoch where none is left of this one."""
        ended = step == self.batches_per_epoch and epoch + 1 < self._epochs
        place = (epoch + 1, 0) if ended and self._read_ahead else (epoch, step)
        if self._position != place:
            self.seek(*place)


class ValLoader(Loader[ShardSampler]):
    """This rank's share of a validation, each `iter()` once through; may be empty, and ranks may differ by a batch."""

    _begun = False

    @property
    def index(self) -> DatasetIndex:
        """The whole split."""
        return self._dataset.index

    def begin(self) -> None:
        """Let the workers begin now, before the first batch is asked for."""
        self._start()
        self._begun = True

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if not self._begun:
            self.begin()
        self._begun = False
        for _ in range(len(self)):
            if batch := self._take():  # one of which no image decodes is empty
                yield batch


def build_train_loader(run: RunContext, store: ImageStore, memory: SharedMemory | None = None) -> TrainLoader:
    """Open the training stream of this rank, of images opened with "linear" interpolation. All ranks call it together.

    `memory` is the node's account of shared memory; a new one where None.

    Raises:
        ConfigError: the ranks do not divide the batch.
    """
    config, index, world = run.config, store.index, run.world
    views = index if isinstance(index, ViewIndex) else None
    repeats = repeat_factors(index) if config.sampling == "balanced" else None
    if repeats is not None:
        own = repeats[views.of_epoch(config.seed, 0)] if views is not None else repeats
        least, most = own.min() / own.mean(), own.max() / own.mean()
        log.info(f"--sampling balanced: an image comes {least:.2f} to {most:.2f} times an epoch")
    shapes_hw = padded_shapes(index.sizes_hw, run.imgsz, run.stride) if config.rect else None
    order = EpochOrder(len(index), run.batch_size, config.seed, run.imgsz, shapes_hw, repeats, views)
    sampler = EpochSampler(order, world.rank, world.size)
    memory = memory or SharedMemory(world)
    batch_bytes = run.rank_batch_size * run.imgsz**2 * 3
    workers = affordable_workers(cap_workers(config.workers, world), batch_bytes, world, memory)
    images: ImageStore | RecentImages = store
    if (run.mosaic_epochs > 0 or store.files < len(index)) and not store.is_cached:
        # Those that a mosaic looks back at, and those that the fastest worker may be ahead of the slowest. Views need
        # no mosaic for it: those of a batch share pictures.
        batches = near_batches(run.batch_size) + workers * PREFETCH
        share = min(run.rank_batch_size * world.local_size + 2 * BLOCK, run.batch_size)  # blocks may reach beyond
        images = share_recent(store, world, batch_size=run.batch_size, share=share, batches=batches)
    elif not store.is_cached:
        images = share_small(store, world)
    dataset = TrainDataset(index, images, run.hyp, config.seed, run.mosaic_epochs)
    return TrainLoader(dataset, sampler, run, workers)


def build_val_loader(
    store: ImageStore,
    world: World,
    *,
    batch_size: int,
    stride: int,
    workers: int,
    memory: SharedMemory | None = None,
    size_hw: tuple[int, int] | None = None,
    repeats: bool = False,
) -> ValLoader:
    """Open this rank's share of a validation: every image is seen by exactly one rank, once. All ranks call it.

    Args:
        store: the images, opened with "area" interpolation.
        batch_size: largest batch of this rank.
        stride: multiple that sides are padded to.
        workers: workers asked for; see `cap_workers`.
        memory: the node's account of shared memory; a new one where None.
        size_hw: height and width that every image is padded to; None = as large as it needs.
        repeats: the images are seen more than once, so those of a small split are kept.
    """
    shapes = validation_shapes(store.index.sizes_hw, store.imgsz, stride)
    if size_hw is not None:
        shapes = np.broadcast_to(np.array(size_hw, np.int64), shapes.shape)
    memory = memory or SharedMemory(world)
    batch_bytes = batch_size * int(shapes.prod(axis=1).max()) * 3
    workers = affordable_workers(cap_workers(workers, world), batch_bytes, world, memory)
    sampler = ShardSampler(world.rank, world.size, batch_size, shapes)
    images = share_small(store, world) if repeats and not store.is_cached else store
    return ValLoader(ValDataset(store.index, images), sampler, world, workers, seed=0)


def _as_is(item: Any) -> Any:
    """In the place of torch's collate function: the dataset already builds whole batches."""
    return item
