"""Data of a training: both splits of the dataset, and their loaders."""

from __future__ import annotations

import logging
import shlex
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tessera.data.feed.cache import ShmBudget, open_images
from tessera.data.feed.image_store import Interpolation
from tessera.data.feed.loader import TrainLoader, ValLoader, build_train_loader, build_val_loader
from tessera.data.feed.sampler import image_weights
from tessera.data.feed.tiles import TileIndex, build_tile_index
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tessera.data.source.messages import untrained_classes
from tessera.models.detector import round_imgsz
from tessera.utils.config import TrainConfig
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.state import Progress
from tessera.utils.errors import UserError
from tessera.utils.flags.program import called
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.seeding import sample_indices, sample_rng
from tessera.utils.types import DatasetIndex, DatasetSpec

MOST_SIZES = 200_000  # boxes for statistics, which then have an error of 0.1 %
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Dataset of a training."""

    spec: DatasetSpec
    images: DatasetIndex  # training split
    train: DatasetIndex  # samples: the same, or with `--tile` its tiles
    val: DatasetIndex
    train_hash: str  # digest of `train`, to detect other data in a resumed run

    @property
    def images_per_epoch(self) -> int:
        """Number of samples in an epoch."""
        return self.train.images_per_epoch if isinstance(self.train, TileIndex) else len(self.train)


def load_data(config: TrainConfig, world: World) -> TrainingData:
    """Load and index the dataset of `--data`, once per node; every rank calls this.

    Raises:
        UserError: no such dataset, or its files cannot be used for training.
    """
    world.set_activity("reading the dataset")
    with torch_distributed_zero_first(world.local_rank, world) as verified:
        try:
            spec = load_spec(config.data)
        except UserError as error:
            if not config.resume:
                raise
            hint = "It is the dataset of the resumed run. If it was moved, give --data."
            raise type(error)(f"{error}\n{hint}") from error
        images = build_index(spec, "train", single_cls=config.single_cls, verified=verified)
        val = build_index(spec, "val", single_cls=config.single_cls, verified=verified)
    train = training_samples(images, config, show_progress=world.is_main)
    return TrainingData(spec, images, train, val, train.content_hash())


def training_samples(images: DatasetIndex, config: TrainConfig, *, show_progress: bool = False) -> DatasetIndex:
    """Return the training split, or with `--tile` the index of its tiles.

    Raises:
        UserError: the tiles do not suit the objects.
    """
    if not config.tile:
        return images
    # The choice of the recipe needs the number of tiles before there is a model, whose stride rounds the size later.
    imgsz = round_imgsz(config.imgsz, stride=1)
    views = build_tile_index(images, config.tile, config.overlap, imgsz, show_progress=show_progress)
    log.info(f"--tile {config.tile}: {views}.")
    if len(views) == len(images):
        log.warning(f"--tile {config.tile}: no image of {images.split} is larger; training on whole images.")
    return views


def warn_of_problems(data: str, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warn of problems of the dataset `data`, such as skipped images, and of classes that only `val` has."""
    texts = [*index_warnings(train), *index_warnings(val)]
    texts += untrained_classes(train.names, train.classes, val.split, val.classes)
    check = f"`{called('train.py')} --data {shlex.quote(data)} --check-data` lists all."
    for text in texts + [check] * bool(texts):
        log.warning(text)


def open_loaders(run: RunContext, data: TrainingData, stack: ExitStack) -> tuple[TrainLoader, ValLoader]:
    """Return the training loader, and the loader of this rank's part of the validation; `stack` closes them."""
    memory = ShmBudget(run.world)
    return open_train_loader(run, data.train, memory, stack), _open_val_loader(run, data.val, memory, stack)


def open_train_loader(run: RunContext, index: DatasetIndex, memory: ShmBudget, stack: ExitStack) -> TrainLoader:
    """Return the training loader; `stack` closes it and its images."""
    interpolation: Interpolation = "area" if run.config.tile else "linear"  # "area" as in detection with tiles
    store = open_images(index, run.imgsz, run.config.cache, interpolation, run.world, memory)
    return stack.enter_context(build_train_loader(run, stack.enter_context(store), memory))


def _open_val_loader(run: RunContext, index: DatasetIndex, memory: ShmBudget, stack: ExitStack) -> ValLoader:
    # With --tile the loader is for images of the report alone; the evaluation reads the files.
    tile, noval = run.config.tile, run.config.noval
    store = open_images(index, run.imgsz, "none" if noval or tile else run.config.cache, "area", run.world, memory)
    return stack.enter_context(
        build_val_loader(
            stack.enter_context(store),
            run.world,
            batch_size=run.val_batch_size,
            stride=run.stride,
            workers=run.config.workers,
            memory=memory,
            repeats=not (noval or tile),
        )
    )


def box_sizes(index: DatasetIndex, imgsz: int) -> NDArray[np.float64]:
    """Return widths and heights of boxes (m, 2), in pixels of images whose long side is `imgsz`; at most MOST_SIZES."""
    chosen = sample_indices(MOST_SIZES, len(index.boxes_xyxy), sample_rng(0, 0, 0, "sizes"))
    boxes = index.boxes_xyxy[chosen]
    scale = (imgsz / index.sizes_hw.max(1))[np.searchsorted(index.box_offsets, chosen, side="right") - 1]
    sizes: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]) * scale[:, None]
    return sizes


def reweight(loader: TrainLoader, index: DatasetIndex, progress: Progress, config: TrainConfig) -> None:
    """Sample images of weak classes more often from this epoch on, with `--image-weights`."""
    if config.image_weights:
        loader.reweight(image_weights(index, progress.class_maps or np.zeros(len(index.names))))
