"""Setup of a training: from the flags to one resolved, frozen run, in one order.

dataset → class names → weights or model → stride → size → samples → hyperparameters → model → loss → batch size
"""

from __future__ import annotations

import dataclasses
import logging
import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.data.augment.transforms import load_transforms
from tessera.models.detector import DetectionModel, check_imgsz, summary
from tessera.models.heads.criterion import Criterion, LossSettings
from tessera.models.heads.head import Head
from tessera.utils.checkpoints.initial_model import (
    build_model,
    freeze_bn_of_first_layers,
    model_source,
    pretraining_of,
    read_weights,
    with_frozen_layers,
)
from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.run_directory import require_outside
from tessera.utils.checkpoints.weights import Weights, own_head
from tessera.utils.config import Hyp, TrainConfig, split_teacher
from tessera.utils.engine.context import RunContext, TrainingData
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision, choose_precision
from tessera.utils.engine.recipe import choose_hyp, chosen_weights, pretrained_hint
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, Teach, Training, TrainState
from tessera.utils.engine.step import largest_size, min_images, scaled_hw, smallest_size
from tessera.utils.errors import ConfigError
from tessera.utils.image_size import ImageSize, image_size, size_hw_of
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.consistency import require_agreement, run_fingerprint
from tessera.utils.ranks.world import World
from tessera.utils.seeding import sample_rng
from tessera.utils.text import plural, row
from tessera.utils.training.autobatch import Trial, auto_batch_size
from tessera.utils.training.data import box_sizes, class_weights, load_splits, training_data, warn_of_problems
from tessera.utils.training.teacher import choose_teacher, open_teacher
from tessera.utils.types import Pretraining

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDIES = (
    "Give a smaller --batch-size (-1 chooses the largest that fits), a smaller --imgsz or a smaller model, or free "
    "memory of other processes. A saved run resumes with --resume and a smaller --batch-size."
)


def init_seeds(seed: int) -> None:
    """Seed Python, NumPy and torch of this process; callers pass seed + 1 + rank."""
    seed %= 2**32  # the range of NumPy
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the process-level generator that third-party code uses
    torch.manual_seed(seed)


class Recipe(NamedTuple):
    """What the flags of a run mean for its dataset."""

    config: TrainConfig  # flags with the weights, the hyperparameter files and the frozen layers of the run
    hyp: Hyp
    pretraining: Pretraining
    weights: Weights | None
    data: TrainingData
    head: type[Head]
    imgsz: ImageSize


def resolve(flags: TrainConfig, hyp: Hyp | None, world: World, resumed: ResumedRun | None = None) -> Recipe:
    """Load the dataset, and choose weights, sizes and hyperparameters for it; every rank calls this.

    Args:
        flags, hyp, world, resumed: as of `train`.

    Raises:
        UserError: invalid flags, data or weights.
    """
    # Own parts and weights name their errors before the dataset is read, which may take minutes.
    own_head(flags.head)
    load_transforms(flags.transforms)
    offered = world.run_on_main(lambda: read_weights(flags, resumed))
    splits = load_splits(flags, world)
    warn_of_problems(flags.data, splits.train, splits.val)
    names = splits.train.names
    if resumed:
        resumed.check_classes(names, flags)

    world.set_activity("building the model")
    images = f"{plural(len(splits.train), 'training image')}, {plural(len(splits.val), 'validation image')}"
    in_part = int((splits.train.set_of_image >= 0).sum())
    some = f"; {plural(in_part, 'training image')} with some classes labelled only" * bool(in_part)
    log.info(row("Data", f"{flags.data}: {images}, {plural(len(names), 'class')}{some}"))
    weights_name = chosen_weights(flags, len(splits.train))
    weights = offered if weights_name else None
    pretraining = pretraining_of(flags, names, weights)
    with torch.device("meta"):  # without memory and random numbers
        outline = DetectionModel(model_source(flags, weights, resumed), names=names, head=own_head(flags.head))
    imgsz = check_imgsz(flags.imgsz, outline.stride)
    data = training_data(splits, flags, imgsz, world)
    if hyp is None:
        words, chosen = choose_hyp(flags, type(outline.head), pretraining, data.images_per_epoch)
    else:
        words, chosen = flags.hyp, hyp
    completed = dataclasses.replace(flags, weights=weights_name, hyp=words)
    config = completed if resumed else with_frozen_layers(completed, chosen)
    if not resumed and (hint := pretrained_hint(config, len(splits.train))):
        log.info(hint)
    return Recipe(config, chosen, pretraining, weights, data, type(outline.head), imgsz)


def set_up(flags: TrainConfig, hyp: Hyp | None, world: World, resumed: ResumedRun | None, folder: Path) -> Training:
    """Return a run from the flags; every rank calls this. Its state is fresh: `resumed.restore` comes later.

    Args:
        flags, hyp, world, resumed, folder: as of `train`.

    Raises:
        UserError: invalid flags, data or weights, or not enough memory.
    """
    work = f"the model at {flags.imgsz} px, before its first batch"
    with explain_out_of_memory(world.accelerator, work, OUT_OF_MEMORY_REMEDIES):
        recipe = resolve(flags, hyp, world, resumed)
        model, hyp_of_run = _build(recipe, world, resumed)
        # Frees the weights' memory for AutoBatch.
        known = () if recipe.weights is None or recipe.weights.is_backbone else recipe.weights.names
        recipe = recipe._replace(weights=None, hyp=hyp_of_run)
        images = torch.rand(1, 3, *size_hw_of(recipe.imgsz), device=world.device)
        precision = choose_precision(recipe.config.amp, world, model, images)
        criterion = _criterion(recipe, model, world)
        config, train = recipe.config, recipe.data.train
        teacher = choose_teacher(config.teacher, config.weights, known, train, criterion, world)
        world.run_on_main(lambda: require_outside(folder / "weights", [split_teacher(teacher)[0]]))
        teach = open_teacher(teacher, train, model.head, world, precision.dtype)
        batch_size = _batch_size(recipe, model, criterion, precision, teach, world)
        config, has_run = dataclasses.replace(config, batch_size=batch_size, teacher=teacher), resumed is not None
        context = RunContext(config, hyp_of_run, world, recipe.imgsz, model.stride, folder, recipe.pretraining, has_run)
    with explain_batch_memory(context):
        return Training(context, recipe.data, _fresh_state(context, model, criterion, precision), criterion, teach)


def _build(recipe: Recipe, world: World, resumed: ResumedRun | None) -> tuple[DetectionModel, Hyp]:
    """Return the raw model on the device, equal on every rank, and the hyperparameters with its fixed norms."""
    config, data, accelerator = recipe.config, recipe.data, world.accelerator
    model = build_model(config, recipe.hyp, data.train.names, recipe.weights, resumed)
    hyp = freeze_bn_of_first_layers(model, config, recipe.hyp, recipe.weights)
    require_agreement(run_fingerprint(hyp, {"train": data.train, "val": data.val}, model), world)
    if not resumed and (recipe.pretraining != "known" or hyp.anchors):  # trained anchors stay
        rng = None if config.noautoanchor else sample_rng(config.seed, 0, 0, "anchors")
        sizes, settings = box_sizes(data.train, recipe.imgsz), LossSettings.of(hyp, imgsz=max(size_hw_of(recipe.imgsz)))
        fitting = world.run_on_main(lambda: model.head.prepare(sizes, settings, rng))
        model.head.load_state_dict(fitting, strict=False)
    model.to(world.device).to(memory_format=accelerator.memory_format)
    log.info(row("Model", summary(model, recipe.imgsz)))
    return model, hyp


def _criterion(recipe: Recipe, model: DetectionModel, world: World) -> Criterion[Any]:
    by_class = class_weights(recipe.hyp, recipe.data.images)
    by_class = None if by_class is None else by_class.to(world.device)
    smoothing, longest = recipe.config.label_smoothing, max(size_hw_of(recipe.imgsz))
    settings = LossSettings.of(recipe.hyp, imgsz=longest, label_smoothing=smoothing, class_weights=by_class)
    return model.head.criterion(settings)


def _batch_size(
    recipe: Recipe, model: DetectionModel, criterion: Criterion[Any], precision: Precision, teach: Teach, world: World
) -> int:
    """Return `--batch-size`, or what AutoBatch chooses."""
    config, imgsz = recipe.config, recipe.imgsz
    if config.batch_size > 0:
        return config.batch_size
    largest, size_hw = imgsz, size_hw_of(imgsz)
    if config.multi_scale:
        factor = largest_size(max(size_hw), model.stride) / max(size_hw)
        largest = image_size(scaled_hw(size_hw, factor, model.stride))
    trial = Trial(config, recipe.hyp, world, imgsz, largest, model, criterion, precision, teach)
    return auto_batch_size(trial, recipe.data.images_per_epoch, world)


def _fresh_state(
    context: RunContext, model: DetectionModel, criterion: Criterion[Any], precision: Precision
) -> TrainState[DetectionModel]:
    world, hyp = context.world, context.hyp
    check_statistics(context)
    optimizer = build_optimizer(
        model,
        context.optimizer,
        hyp,
        context.batch_size,
        fused=world.accelerator.fused_optimizers,
        layer_decay=context.layer_decay,
    )
    progress = Progress(torch.zeros(len(criterion.names), device=world.device))
    stopper = EarlyStopping(context.config.patience)
    return TrainState(model, ModelEMA(model, hyp.ema_fraction), optimizer, precision, stopper, progress)


def check_statistics(context: RunContext) -> None:
    """Raise ConfigError if a batch leaves a normalisation a single value per channel."""
    config, stride, ranks = context.config, context.stride, context.world.size
    size = smallest_size(context.longer_side, stride) if config.multi_scale else context.longer_side
    images = context.batch_size if config.sync_bn else context.rank_batch_size
    if images >= min_images(size, stride):
        return
    scaled, enough = (f" --multi-scale, down to {size} px", 4 * stride) if config.multi_scale else ("", 2 * stride)
    each, shared = (" on each rank", ", --sync-bn") if ranks > 1 else ("", "")
    raise ConfigError(
        f"--batch-size {context.batch_size} --imgsz {context.imgsz}{scaled}: the deepest layers get one value per "
        f"channel{each}, which has no variance to normalise by. Give --batch-size {2 * ranks} or more{shared}, or "
        f"--imgsz {enough} or more."
    )


def explain_batch_memory(context: RunContext) -> AbstractContextManager[None]:
    """Return a context that turns exhausted memory in a step into a UserError."""
    scale, hint, accelerator = "", "", context.world.accelerator
    if context.config.multi_scale:
        scale = f" (up to {largest_size(context.longer_side, context.stride)} px)"
    if context.varies_sizes and not accelerator.is_host:
        hint = " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less on varying sizes."
    work = f"a batch of {plural(context.rank_batch_size, 'image')} a rank at {context.imgsz} px{scale}"
    return explain_out_of_memory(accelerator, work, OUT_OF_MEMORY_REMEDIES + hint)
