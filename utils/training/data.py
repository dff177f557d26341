"""The data of a training: both splits of the dataset, and the loaders that feed them to the ranks."""

from __future__ import annotations

import itertools
import logging
import shlex
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tessera.data.feed.cache import open_images
from tessera.data.feed.image_store import Interpolation
from tessera.data.feed.loader import TrainLoader, ValLoader, build_train_loader, build_val_loader
from tessera.data.feed.sampler import image_weights
from tessera.data.feed.shared_memory import SharedMemory
from tessera.data.feed.tiles import ViewIndex, view_index
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tessera.models.detector import round_imgsz
from tessera.utils.config import CacheMode, TrainConfig
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.state import Progress
from tessera.utils.errors import UserError
from tessera.utils.flags.program import called
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.seeding import at_most, sample_rng
from tessera.utils.types import DatasetIndex, DatasetSpec

MOST_SIZES = 200_000  # boxes that statistics of a dataset's boxes are taken from
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """The dataset of a training."""

    spec: DatasetSpec
    pictures: DatasetIndex  # the training split
    train: DatasetIndex  # what is trained on: the same, or with `--tile` the views of it
    val: DatasetIndex
    train_hash: str  # digest of `train`, by which a resumed run knows other data

    @property
    def images_per_epoch(self) -> int:
        """How many images an epoch has."""
        return self.train.images_per_epoch if isinstance(self.train, ViewIndex) else len(self.train)


def read_data(config: TrainConfig, world: World) -> TrainingData:
    """The dataset of `--data`, indexed and compared once a node; every rank calls this.

    Raises:
        UserError: no such dataset, or its files are not to be trained on.
    """
    world.set_activity("reading the dataset")
    with torch_distributed_zero_first(world.local_rank, world) as verified:
        try:
            spec = load_spec(config.data)
        except UserError as error:
            if not config.resume:
                raise
            told = "It is the dataset of the resumed run: if that was moved, give --data."
            raise type(error)(f"{error}\n{told}") from error
        pictures = build_index(spec, "train", single_cls=config.single_cls, verified=verified)
        val = build_index(spec, "val", single_cls=config.single_cls, verified=verified)
    train = views_asked_for(pictures, config, show_progress=world.is_main)
    return TrainingData(spec, pictures, train, val, train.content_hash())


def views_asked_for(pictures: DatasetIndex, config: TrainConfig, *, show_progress: bool = False) -> DatasetIndex:
    """The index of the training split, or with `--tile` the views of its pictures.

    Raises:
        UserError: tiles do not suit the objects.
    """
    if not config.tile:
        return pictures
    # The recipe, which the model is built with, asks for the number of views: the model's own stride comes later.
    imgsz = round_imgsz(config.imgsz, stride=1)
    views = view_index(pictures, config.tile, config.overlap, imgsz, show_progress=show_progress)
    log.info(f"--tile {config.tile}: {views}.")
    if len(views) == len(pictures):
        log.warning(f"--tile {config.tile}: no image of {pictures.split} is larger: they are trained on as they are.")
    return views


def warn_of_problems(data: str, *indexes: DatasetIndex) -> None:
    """Warn of what is wrong with the dataset `data`, such as images that the scans left out."""
    texts = list(itertools.chain.from_iterable(map(index_warnings, indexes)))
    check = f"`{called('train.py')} --data {shlex.quote(data)} --check-data` lists every one."
    for text in texts + [check] * bool(texts):
        log.warning(text)


def open_loaders(run: RunContext, data: TrainingData, stack: ExitStack) -> tuple[TrainLoader, ValLoader]:
    """The stream of the training, and this rank's share of the validation; closed by `stack`."""
    memory = SharedMemory(run.world)
    return open_train_loader(run, data.train, memory, stack), open_val_loader(run, data.val, memory, stack)


def open_train_loader(run: RunContext, index: DatasetIndex, memory: SharedMemory, stack: ExitStack) -> TrainLoader:
    """Images and stream of the training, closed by `stack`."""
    interpolation: Interpolation = "area" if run.config.tile else "linear"  # of views, as detection in tiles has it
    store = open_images(index, run.imgsz, run.config.cache, interpolation, run.world, memory)
    return stack.enter_context(build_train_loader(run, stack.enter_context(store), memory))


def open_val_loader(run: RunContext, index: DatasetIndex, memory: SharedMemory, stack: ExitStack) -> ValLoader:
    """Images of the validation and this rank's share of them, closed by `stack`.

    With `--tile` they are for pictures of the results alone: what is measured is taken from the files.
    """
    cache: CacheMode = "none" if run.config.noval or run.config.tile else run.config.cache
    store = stack.enter_context(open_images(index, run.imgsz, cache, "area", run.world, memory))
    return stack.enter_context(
        build_val_loader(
            store,
            run.world,
            # Without gradients twice as many fit. In tiles each takes long, and ranks vote on stopping between batches.
            batch_size=1 if run.config.tile else 2 * run.rank_batch_size,
            stride=run.stride,
            workers=run.config.workers,
            memory=memory,
            repeats=not (run.config.noval or run.config.tile),
        )
    )


def box_sizes(index: DatasetIndex, imgsz: int) -> NDArray[np.float64]:
    """Widths and heights of boxes (m, 2), in pixels of images whose long side is `imgsz`.

    Of all boxes in their order, or of 200,000 that are the same at each call: shares of so many are known to 0.1 %.
    """
    chosen = at_most(MOST_SIZES, len(index.boxes_xyxy), sample_rng(0, 0, 0, "sizes"))
    boxes = index.boxes_xyxy[chosen]
    scale = (imgsz / index.sizes_hw.max(1))[np.searchsorted(index.box_offsets, chosen, side="right") - 1]
    sizes: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]) * scale[:, None]
    return sizes


def reweight(loader: TrainLoader, index: DatasetIndex, progress: Progress, config: TrainConfig) -> None:
    """`--image-weights`: sample images of weak classes more often from this epoch on."""
    if config.image_weights:
        loader.reweight(image_weights(index, progress.class_maps or np.zeros(len(index.names))))
