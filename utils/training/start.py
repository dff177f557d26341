"""Start of a training: run directory, recipe, AutoBatch size, precision, data, model and loss, from the flags."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tessera.models.detector import DetectionModel, check_imgsz, summary
from tessera.models.heads.criterion import Criterion, LossSettings
from tessera.utils.checkpoints.initial_model import (
    build_model,
    freeze_bn_of_first_layers,
    head_class,
    own_head,
    pretraining_of,
    read_weights,
    with_frozen_layers,
)
from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.run_directory import new_run
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.ema import ModelEMA
from tessera.utils.engine.multi_scale import check_statistics, largest_size
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import choose_precision
from tessera.utils.engine.recipe import pretrained_hint, resolve_auto_weights, with_recipe
from tessera.utils.engine.state import Progress, TrainState
from tessera.utils.engine.stopping import EarlyStopping
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.consistency import require_agreement, run_fingerprint
from tessera.utils.ranks.world import World
from tessera.utils.report.trackers.loggers import import_tracker
from tessera.utils.seeding import sample_rng
from tessera.utils.text import plural, row
from tessera.utils.training.autobatch import Trial, auto_batch_size
from tessera.utils.training.class_weights import class_weights
from tessera.utils.training.data import TrainingData, box_sizes, load_data, warn_of_problems

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDIES = (
    "Give a smaller --batch-size (-1 chooses the largest that fits), a smaller --imgsz or a smaller model, or free "
    "memory of other processes. A saved run resumes with --resume and a smaller --batch-size."
)


def open_run(
    flags: TrainConfig, hyp: Hyp | None, world: World, resumed: ResumedRun | None, folder: Path | None, stack: ExitStack
) -> tuple[RunContext, TrainingData, TrainState[DetectionModel], Criterion[Any]]:
    """Return a run's context, data, state and loss from the flags; every rank calls this.

    The context's `config` is the given flags with the chosen recipe and batch size. The state is that of a fresh run:
    `resumed.restore` comes later.

    Args:
        flags, hyp, world, resumed, folder: as of `train`.
        stack: closes the run directory, and explains errors of exhausted memory.

    Raises:
        UserError: invalid flags, data, weights or directories, or not enough memory.
    """
    accelerator = world.accelerator
    building = f"the model at {flags.imgsz} px, before its first batch"
    with explain_out_of_memory(accelerator, building, OUT_OF_MEMORY_REMEDIES):
        world.run_on_main(lambda: all(map(import_tracker, flags.logger_names)))  # modules cannot be sent
        # Check the flags before reading the dataset, which may take minutes.
        own_head(flags)
        folder = folder or stack.enter_context(new_run(flags, world))
        weights = world.run_on_main(lambda: read_weights(flags, resumed))
        data = load_data(flags, world)
        warn_of_problems(flags.data, data.images, data.val)
        if resumed:
            resumed.check_classes(data.train.names, flags)

        world.set_activity("building the model")
        config, names = resolve_auto_weights(flags, len(data.images)), data.train.names
        weights = weights or world.run_on_main(lambda: read_weights(config, resumed))
        images = f"{plural(len(data.images), 'training image')}, {plural(len(data.val), 'validation image')}"
        log.info(row("Data", f"{flags.data}: {images}, {plural(len(names), 'class')}"))
        pretraining = pretraining_of(config, names, weights)
        if hyp is None:
            config, hyp = with_recipe(config, head_class(config, names, weights), pretraining, data.images_per_epoch)
        if not resumed and (offer := pretrained_hint(config, len(data.images))):
            log.info(offer)
        config = config if resumed else with_frozen_layers(config, hyp)
        by_class = class_weights(hyp, data.images)
        model = build_model(config, hyp, names, weights, resumed)
        hyp = freeze_bn_of_first_layers(model, config, hyp, weights)
        del weights  # frees memory for AutoBatch
        require_agreement(run_fingerprint(hyp, {"train": data.train, "val": data.val}, model), world)
        imgsz = check_imgsz(config.imgsz, model.stride)
        by_class = None if by_class is None else by_class.to(world.device)
        settings = LossSettings.of(hyp, imgsz=imgsz, label_smoothing=config.label_smoothing, class_weights=by_class)
        if not resumed and (pretraining != "known" or hyp.anchors):  # trained anchors stay
            rng = None if config.noautoanchor else sample_rng(config.seed, 0, 0, "anchors")
            model.head.load_state_dict(
                world.run_on_main(lambda: model.head.prepare(box_sizes(data.train, imgsz), settings, rng)), strict=False
            )
        model.to(world.device).to(memory_format=accelerator.memory_format)
        log.info(row("Model", summary(model, imgsz)))
        precision = choose_precision(config.amp, world, model, torch.rand(1, 3, imgsz, imgsz, device=world.device))
        criterion = model.head.criterion(settings)
        run = RunContext(config, hyp, world, imgsz, model.stride, folder, pretraining, resumed is not None)
        largest = largest_size(imgsz, model.stride) if config.multi_scale else imgsz
        if run.batch_size <= 0:
            trial = Trial(run, model, criterion, precision, largest)
            config = dataclasses.replace(config, batch_size=auto_batch_size(trial, data.images_per_epoch, world))
            run = dataclasses.replace(run, config=config)
    scale = f" (up to {largest} px)" if config.multi_scale else ""
    hint = (
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less on varying sizes."
        if run.varies_sizes and not accelerator.is_host
        else ""
    )
    work = f"a batch of {plural(run.rank_batch_size, 'image')} a rank at {run.imgsz} px{scale}"
    stack.enter_context(explain_out_of_memory(accelerator, work, OUT_OF_MEMORY_REMEDIES + hint))
    check_statistics(run)
    fused = accelerator.fused_optimizers
    optimizer = build_optimizer(model, run.optimizer, run.hyp, run.batch_size, fused=fused, layer_decay=run.layer_decay)
    progress = Progress(torch.zeros(len(criterion.names), device=world.device))
    ema, stopper = ModelEMA(model, run.hyp.ema_fraction), EarlyStopping(run.config.patience)
    return run, data, TrainState(model, ema, optimizer, precision, stopper, progress), criterion
