"""Batches of a dataset: in the samplers' order, each built whole by a worker.

Legend: B images of this rank's batch, T objects of the batch.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.augment.filters import open_filter
from data.augment.scene import Placement, letterbox, train_sample
from data.feed.images import ImageSource, ImageStore
from data.feed.recent import share_recent
from data.feed.sampler import BLOCK, EpochSampler, ShardSampler, near_batches, validation_shapes
from utils.config import Hyp
from utils.errors import UserError, lost_worker
from utils.machine.limits import usable_cpus
from utils.ranks.stack_dumps import answer_where
from utils.ranks.world import World
from utils.seeding import sample_rng
from utils.types import Batch, DatasetIndex, Draw, Sample

log = logging.getLogger(__name__)

S = TypeVar("S", EpochSampler, ShardSampler)
L = TypeVar("L", bound="Loader[Any]")

_PREFETCH = 2  # batches each worker prepares ahead
_SHARED_MEMORY = Path("/dev/shm")  # where batches travel from workers to their rank
_NOT_INVERTIBLE = (math.nan,) * 4


class DetectionDataset(Dataset[Batch]):
    """Images and labels of an index at loading size; a data.augment.scene.SampleSource.

    Indexed by the draws of a whole batch, so that every image is written straight into its place in the batch.

    Args:
        index: the images and labels.
        store: the same images, opened.
    """

    def __init__(self, index: DatasetIndex, store: ImageSource) -> None:
        self.index, self.store = index, store

    def __len__(self) -> int:
        return len(self.index)

    def sample(self, index: int) -> Sample:
        """Image `index`, long side as loaded, with boxes and polygons in its pixels. The image may be read-only."""
        image = self.store.load(index)
        classes, boxes_xyxy = self.index.labels(index)
        scale_xy = self._loading_scale(index, image).astype(np.float32)
        return Sample(
            image,
            boxes_xyxy * np.tile(scale_xy, 2),
            classes,
            [points * scale_xy for points in self.index.segments(index)],
        )

    def __getitems__(self, draws: Sequence[Draw]) -> Batch | UserError:
        """Build the batch of `draws`, which have one shape; a user's mistake is returned, for the rank to raise."""
        try:
            return self._build(draws)
        except UserError as error:
            # Raised here, torch would hand it over as another exception, whose message is a worker's traceback.
            return error

    def _build(self, draws: Sequence[Draw]) -> Batch:
        height, width = draws[0].size_hw
        assert all(draw.size_hw == (height, width) for draw in draws), draws
        images = _empty_images(len(draws), height, width)
        targets = np.zeros((0, 6), np.float32)
        placements = np.empty((len(draws), 4))
        rows = [targets]
        for i, (draw, out) in enumerate(zip(draws, images.numpy(), strict=True)):
            sample, placements[i] = self._place(draw, out)
            rows.append(np.empty((len(sample.classes), 6), np.float32))
            rows[-1][:, 0], rows[-1][:, 1], rows[-1][:, 2:] = i, sample.classes, sample.boxes_xyxy
        indices = np.array([draw.index for draw in draws], np.int64)
        return Batch(
            images,
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(indices),
            torch.from_numpy(self.index.sizes_hw[indices].astype(np.int64)),
            torch.from_numpy(placements),
        )

    def _place(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        """Write the image of `draw` into `out`; return it as a sample, and its placement from the original image."""
        raise NotImplementedError

    def _loading_scale(self, index: int, image: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Loaded over original width, and height: float64 (2,)."""
        height, width = self.index.sizes_hw[index].tolist()
        return np.array([image.shape[1] / width, image.shape[0] / height])


class TrainDataset(DetectionDataset):
    """Augmented samples, each a pure function of (seed, epoch, position).

    Args:
        index, store: as in DetectionDataset.
        hyp: strengths of the augmentations.
        seed: the run's seed, the same on every rank.
        mosaic_epochs: mosaic and mixup are on in epochs below this one.
    """

    def __init__(self, index: DatasetIndex, store: ImageSource, hyp: Hyp, seed: int, mosaic_epochs: int) -> None:
        super().__init__(index, store)
        self.hyp, self.seed, self.mosaic_epochs = hyp, seed, mosaic_epochs
        self.colour = open_filter()

    def _place(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        rng = sample_rng(self.seed, draw.epoch, draw.position)
        mosaic = draw.epoch < self.mosaic_epochs
        with self.store.near(draw):
            sample = train_sample(draw, self, self.hyp, rng, mosaic=mosaic, out=out, colour=self.colour)
        return sample, _NOT_INVERTIBLE


class ValDataset(DetectionDataset):
    """Letterboxed samples, as they are, with the placement that leads back to the original image."""

    def _place(self, draw: Draw, out: NDArray[np.uint8]) -> tuple[Sample, Placement]:
        loaded = self.sample(draw.index)
        placed, (scale_x, scale_y, left, top) = letterbox(loaded, draw.size_hw, out)
        loading_x, loading_y = self._loading_scale(draw.index, loaded.image).tolist()
        return placed, (scale_x * loading_x, scale_y * loading_y, left, top)


def _empty_images(count: int, height: int, width: int) -> Tensor:
    """Uninitialised uint8 (count, height, width, 3); a worker's in shared memory, where torch would copy it anyway."""
    shape = (count, height, width, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class Loader(Generic[S]):
    """A DataLoader whose workers live from the first batch until `close`.

    Args:
        dataset: builds batches.
        sampler: tells which, in which order.
        world: this rank.
        workers: worker processes; 0 builds batches in this one.
        pin_memory: hand batches over in page-locked memory, for copies to a CUDA device.
        seed: the run's seed. Process-level generators of the workers start from it offset by rank; no sample draws
            from them.
    """

    def __init__(
        self, dataset: DetectionDataset, sampler: S, *, world: World, workers: int, pin_memory: bool, seed: int
    ) -> None:
        self._sampler: S = sampler
        self._loader: DataLoader[Batch] | None = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            worker_init_fn=_begin_worker,
            generator=torch.Generator().manual_seed((seed + 1 + world.rank) % 2**63),
            persistent_workers=workers > 0,
            prefetch_factor=_PREFETCH if workers else None,
        )
        self._stream: Iterator[Batch | UserError] = iter(())

    def close(self) -> None:
        """End and join the workers. The loader gives no batches afterwards."""
        # These are the only references to torch's iterator, which joins its workers as it goes.
        self._stream = iter(())
        self._loader = None

    def __enter__(self: L) -> L:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        """Let the workers begin with what the sampler gives next; what they had begun before is dropped."""
        assert self._loader is not None, "the loader is closed"
        self._stream = iter(self._loader)

    def _take(self) -> Batch:
        try:
            item = next(self._stream)
        except (ConnectionError, EOFError) as error:  # it had a batch ready; torch would not say whose connection
            raise lost_worker("its connection broke") from error
        if isinstance(item, UserError):
            raise item
        return item


class TrainLoader(Loader[EpochSampler]):
    """The training stream of one rank, an epoch at a time, from any batch on.

    As an epoch's last batch is handed over, the workers begin the next epoch, so that they do not idle while the model
    is validated and saved. Not so under `--image-weights`: there the next epoch depends on that validation.

    Args:
        dataset, sampler, world, workers, pin_memory, seed: as in Loader.
        epochs: epochs in all; nothing is prepared beyond them.
        read_ahead: begin the next epoch early.
    """

    def __init__(
        self,
        dataset: TrainDataset,
        sampler: EpochSampler,
        *,
        world: World,
        workers: int,
        pin_memory: bool,
        seed: int,
        epochs: int,
        read_ahead: bool = True,
    ) -> None:
        super().__init__(dataset, sampler, world=world, workers=workers, pin_memory=pin_memory, seed=seed)
        self._epochs, self._read_ahead = epochs, read_ahead
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
        """Draw images in proportion to `weights` (N,), see `image_weights`, from the next epoch on."""
        self._sampler.reweight(weights)
        self._position = None  # what was begun with the old weights does not count

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1 … of `epoch`.

        Raises:
            UserError: an image does not decode, or changed since it was indexed.
        """
        if self._position != (epoch, start):
            self.seek(epoch, start)
        for step in range(start, self.batches_per_epoch):
            assert self._position == (epoch, step), "another iteration has moved the stream"
            batch = self._take()
            self._position = (epoch, step + 1)
            if self._read_ahead and step + 1 == self.batches_per_epoch and epoch + 1 < self._epochs:
                self.seek(epoch + 1)
            yield batch


class ValLoader(Loader[ShardSampler]):
    """This rank's share of a validation, each `iter()` once through; may be empty, and ranks may differ by a batch."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._start()
        for _ in range(len(self)):
            yield self._take()


def build_train_loader(
    index: DatasetIndex,
    store: ImageStore,
    *,
    hyp: Hyp,
    imgsz: int,
    batch_size: int,
    seed: int,
    epochs: int,
    world: World,
    workers: int,
    rect: bool = False,
    image_weights: bool = False,
    close_mosaic: int = 0,
    stride: int = 32,
    pin_memory: bool = False,
) -> TrainLoader:
    """Open the training stream of this rank.

    Args:
        index, store: the images, opened with "linear" interpolation.
        hyp: strengths of the augmentations.
        imgsz: side of a sample in pixels.
        batch_size: images of a global batch, over all ranks.
        seed: the run's seed, the same on every rank.
        epochs: epochs in all.
        world: this rank.
        workers: workers asked for; see `cap_workers`.
        rect: batches of one aspect ratio instead of squares, without mosaic.
        image_weights: the order depends on weights: call `reweight` before each epoch that they change for.
        close_mosaic: no mosaic or mixup in so many last epochs.
        stride: multiple that rectangular sides are rounded up to.
        pin_memory: for copies to a CUDA device.

    Raises:
        ConfigError: the ranks do not divide the batch.
    """
    sampler = EpochSampler(
        len(index),
        batch_size,
        seed=seed,
        imgsz=imgsz,
        rank=world.rank,
        size=world.size,
        sizes_hw=index.sizes_hw if rect else None,
        stride=stride,
    )
    workers = _affordable_workers(cap_workers(workers, world), batch_size // world.size * imgsz**2 * 3, world)
    mosaic_epochs = 0 if rect or hyp.mosaic == 0 else epochs - close_mosaic
    images: ImageSource = store
    if mosaic_epochs > 0 and not store.is_cached:
        # Those that a mosaic looks back at, and those that the fastest worker may be ahead of the slowest.
        batches = near_batches(batch_size) + workers * _PREFETCH
        share = min(batch_size * world.local_size // world.size + 2 * BLOCK, batch_size)  # blocks may reach beyond
        images = share_recent(store, world, batch_size=batch_size, share=share, batches=batches)
    return TrainLoader(
        TrainDataset(index, images, hyp, seed, mosaic_epochs),
        sampler,
        world=world,
        workers=workers,
        pin_memory=pin_memory,
        seed=seed,
        epochs=epochs,
        read_ahead=not image_weights,
    )


def build_val_loader(
    index: DatasetIndex,
    store: ImageStore,
    *,
    imgsz: int,
    stride: int,
    batch_size: int,
    world: World,
    workers: int,
    pin_memory: bool = False,
) -> ValLoader:
    """Open this rank's share of a validation; every image is seen by exactly one rank, once.

    Args:
        index, store: the images, opened with "area" interpolation.
        imgsz: long side of an image in pixels.
        stride: multiple that sides are padded to.
        batch_size: largest batch of this rank.
        world: this rank.
        workers: workers asked for; see `cap_workers`.
        pin_memory: for copies to a CUDA device.
    """
    shapes = validation_shapes(index.sizes_hw, imgsz, stride)
    return ValLoader(
        ValDataset(index, store),
        ShardSampler(len(index), world.rank, world.size, batch_size, shapes),
        world=world,
        workers=_affordable_workers(
            cap_workers(workers, world), batch_size * int(shapes.prod(axis=1).max()) * 3, world
        ),
        pin_memory=pin_memory,
        seed=0,
    )


def cap_workers(asked: int, world: World) -> int:
    """Workers for this rank: as asked, but no more than its part of the processors that the node's ranks may use.

    At least 1 where any were asked for: even a single processor overlaps decoding with a GPU's work.
    """
    return min(asked, max(usable_cpus() // world.local_size, 1))


def _affordable_workers(workers: int, batch_bytes: int, world: World) -> int:
    """Workers whose batches fit into /dev/shm beside those of the node's other ranks; a full one kills workers."""
    if workers == 0 or not _SHARED_MEMORY.is_dir():
        return workers
    room = shutil.disk_usage(_SHARED_MEMORY).free // world.local_size // max(batch_bytes, 1)
    # Each worker holds a finished batch for every one it prepares ahead; the rank holds up to two more.
    affordable = min(workers, max((room - 2) // _PREFETCH, 0))
    if affordable < workers and world.is_main:
        log.warning(
            f"{_SHARED_MEMORY} has room for the batches of {affordable} loader workers a rank, not {workers}: using "
            f"{affordable}. Give the container more (docker run --shm-size=8g, or --ipc=host)."
        )
    return affordable


def _as_is(item: Any) -> Any:
    """What stands where torch would collate: the dataset builds whole batches."""
    return item


def _begin_worker(worker: int) -> None:
    """Start of a worker process. Its random generators are already seeded by torch, from the loader's generator."""
    torch.set_num_threads(1)
    gc.freeze()  # what comes from the rank lives on: a collector that looked through it would copy its pages
    # Ctrl-C, torchrun and SLURM signal the whole process group; the rank alone answers, and ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    answer_where(f"loader worker {worker} of process {os.getppid()}")
