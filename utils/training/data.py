"""Data of a training: both splits of the dataset, their loaders, box sizes and class weights."""

from __future__ import annotations

import json
import logging
import shlex
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.feed.cache import ShmBudget, open_images
from tessera.data.feed.image_sizes import fit_ratios
from tessera.data.feed.image_store import Interpolation
from tessera.data.feed.loader import TrainLoader, ValLoader, build_train_loader, build_val_loader
from tessera.data.feed.sampler import image_weights
from tessera.data.feed.tiles import build_tile_index
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, index_warnings
from tessera.data.source.messages import untrained_classes
from tessera.utils.config import AUTO, Hyp, TrainConfig
from tessera.utils.engine.context import RunContext, TrainingData
from tessera.utils.engine.state import Progress, Training
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.flags.program import called
from tessera.utils.image_size import ImageSize
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.report.observers import EpochResult, Observer
from tessera.utils.seeding import sample_indices, sample_rng
from tessera.utils.text import first_of, shown
from tessera.utils.types import DatasetIndex, DatasetSpec

BETA = 0.999  # of the effective number of objects, as in Cui et al.
LONG_WAIT, LONG_WAIT_S = 0.2, 10.0  # fraction and seconds of an epoch; the workers' start alone takes a few
MOST_SIZES = 200_000  # boxes for statistics, which then have an error of 0.1 %
log = logging.getLogger(__name__)


class Splits(NamedTuple):
    """Splits of a dataset that a training reads."""

    spec: DatasetSpec
    train: DatasetIndex
    val: DatasetIndex


def load_splits(config: TrainConfig, world: World) -> Splits:
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
        train = build_index(spec, "train", single_cls=config.single_cls, verified=verified)
        val = build_index(spec, "val", single_cls=config.single_cls, verified=verified)
    return Splits(spec, train, val)


def training_data(splits: Splits, config: TrainConfig, imgsz: ImageSize, world: World) -> TrainingData:
    """Return the dataset of a training at the size `imgsz`: the images, or with `--tile` their tiles.

    Raises:
        UserError: the tiles do not suit the objects.
    """
    spec, images, val = splits
    if not config.tile:
        return TrainingData(spec, images, images, val, len(images), images.content_hash())
    views = build_tile_index(images, config.tile, config.overlap, imgsz, show_progress=world.is_main)
    return TrainingData(spec, images, views, val, views.images_per_epoch, views.content_hash())


def warn_of_problems(data: str, train: DatasetIndex, val: DatasetIndex) -> None:
    """Warn of problems of the dataset `data`, such as skipped images, and of classes that only `val` has."""
    texts = [*index_warnings(train), *index_warnings(val)]
    texts += untrained_classes(train.names, train.classes, val.split, val.classes, train.unlabelled_sets)
    check = f"`{called('train.py')} --data {shlex.quote(data)} --check-data` lists all."
    for text in texts + [check] * bool(texts):
        log.warning(text)


def open_loaders(context: RunContext, data: TrainingData, stack: ExitStack) -> tuple[TrainLoader, ValLoader]:
    """Return the training loader, and the loader of this rank's part of the validation; `stack` closes them."""
    memory = ShmBudget(context.world)
    return open_train_loader(context, data.train, memory, stack), _open_val_loader(context, data.val, memory, stack)


def open_train_loader(context: RunContext, index: DatasetIndex, memory: ShmBudget, stack: ExitStack) -> TrainLoader:
    """Return the training loader; `stack` closes it and its images."""
    interpolation: Interpolation = "area" if context.config.tile else "linear"  # "area" as in detection with tiles
    store = open_images(index, context.imgsz, context.config.cache, interpolation, context.world, memory)
    return stack.enter_context(build_train_loader(context, stack.enter_context(store), memory))


def _open_val_loader(context: RunContext, index: DatasetIndex, memory: ShmBudget, stack: ExitStack) -> ValLoader:
    # With --tile the loader is for images of the report alone; the evaluation reads the files.
    tile, noval = context.config.tile, context.config.noval
    store = open_images(
        index, context.imgsz, "none" if noval or tile else context.config.cache, "area", context.world, memory
    )
    return stack.enter_context(
        build_val_loader(
            stack.enter_context(store),
            context.world,
            batch_size=context.val_batch_size,
            stride=context.stride,
            workers=context.config.workers,
            memory=memory,
            repeats=not (noval or tile),
        )
    )


def box_sizes(index: DatasetIndex, imgsz: ImageSize) -> NDArray[np.float64]:
    """Return widths and heights of boxes (m, 2), in pixels of images resized to `imgsz`; at most MOST_SIZES."""
    chosen = sample_indices(MOST_SIZES, len(index.boxes_xyxy), sample_rng(0, 0, 0, "sizes"))
    boxes = index.boxes_xyxy[chosen]
    to, of = fit_ratios(index.sizes_hw, imgsz)
    scale = (to / of)[np.searchsorted(index.box_offsets, chosen, side="right") - 1]
    sizes: NDArray[np.float64] = (boxes[:, 2:] - boxes[:, :2]) * scale[:, None]
    return sizes


def reweight(loader: TrainLoader, index: DatasetIndex, progress: Progress, config: TrainConfig) -> None:
    """Sample images of weak classes more often from this epoch on, with `--image-weights`."""
    if config.image_weights:
        loader.reweight(image_weights(index, progress.class_maps or np.zeros(len(index.names))))


class SlowLoaderWarning(Observer):
    """Warning after the first whole epoch if much of it was spent waiting for batches, with remedies."""

    def begin(self, training: Training) -> None:
        self._training: Training | None = training
        self._is_rest = training.state.progress.batch_in_epoch > 0

    def epoch(self, epoch: EpochResult) -> None:
        if self._is_rest:
            self._is_rest = False
            return
        training, self._training = self._training, None
        if training is None or epoch.data_wait < LONG_WAIT:
            return
        rate, config, processors = epoch.images_per_s, training.context.config, training.context.world.cpus
        possible = rate / max(1 - epoch.data_wait, 0.01)
        if epoch.data_wait * training.data.images_per_epoch < LONG_WAIT_S * rate:
            return
        remedies = [f"--workers {processors} (now {config.workers})"] * (config.workers < processors)
        remedies += ["--cache ram, or disk"] * (config.cache == "none")
        log.warning(
            f"The loader cannot keep up: {epoch.data_wait:.0%} of epoch {epoch.number} was spent waiting for batches. "
            f"It gives {rate:,.0f} images/s, and the steps could take {possible:,.0f}. Give "
            f"{' or '.join(remedies) or 'more processors, or a smaller --imgsz'}."
        )


def class_weights(hyp: Hyp, index: DatasetIndex) -> Tensor | None:
    """Return `Criterion.class_weights` for a training on `index`: float32 (C,) on the CPU, or None.

    Classes that `hyp` does not name weigh 1. The mean weight over the objects of the dataset is scaled to 1.

    Raises:
        ConfigError: a weight for a class that the dataset does not have.
    """
    if not hyp.class_weights:
        return None
    counts = np.bincount(index.classes, minlength=len(index.names))
    if hyp.class_weights == AUTO:
        weights = by_effective_number(counts)
    else:
        weights = np.ones(len(counts))
        for name, weight in json.loads(hyp.class_weights).items():
            if name not in index.names:
                raise ConfigError(
                    f"Hyperparameter class_weights: the dataset has no class {shown(name)}."
                    f"{did_you_mean(name, index.names)} Its classes: {first_of(list(map(shown, index.names)), 10)}."
                )
            weights[index.names.index(name)] = weight
    weights /= (weights * counts).sum() / max(counts.sum(), 1) or 1.0  # unchanged without objects
    least, most = int(weights.argmin()), int(weights.argmax())
    log.info(
        f"Class weights from {weights[least]:.3g} ({shown(index.names[least])}) to {weights[most]:.3g} "
        f"({shown(index.names[most])})"
    )
    return torch.from_numpy(weights).float()


def by_effective_number(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights (C,) of one over the effective number of objects of each class (Cui et al., arXiv 1901.05555).

    The effective number of n objects is (1 − β^n) / (1 − β): about n for few, and at most 1,000. A class without
    objects counts as having one.
    """
    return (1 - BETA) / (1 - BETA ** np.maximum(counts, 1))
