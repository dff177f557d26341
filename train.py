"""Train a detector.

    uv run train.py --data shapes.yaml --epochs 20                                      # one process
    uv run torchrun --standalone --nproc-per-node 2 train.py --data coco128.yaml --weights yolov5n.pt
    uv run torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 train.py --data coco.yaml
    uv run train.py --resume                                                            # the newest run
    uv run train.py --resume runs/train/exp/weights/last.pt --epochs 200                # further than planned

Every rank runs every line; `world` and `journal` hide the difference. All that is random in a sample is a function of
(seed, epoch, position), and the schedule one of the iteration, so a run can be stopped and resumed, cut over more or
fewer ranks, and stays the same run.

From Python: `tessera.train(data="shapes.yaml", epochs=20)` takes the names of the flags.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tessera.utils.config import CacheMode, Hyp, TrainConfig, load_hyp
from tessera.utils.startup import check_command_line, end_process

if __name__ == "__main__":
    check_command_line(TrainConfig)

import numpy as np
import torch

from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import TrainLoader, ValLoader, build_train_loader, build_val_loader
from tessera.data.feed.sampler import image_weights
from tessera.data.feed.shared_memory import SharedMemory
from tessera.data.source.checks.dataset import check_dataset
from tessera.data.source.checks.doubts import doubts
from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion
from tessera.models.summary import summary
from tessera.utils.checkpoints.folder import new_run
from tessera.utils.checkpoints.resume import ResumedRun, call_in_words, recall_end, remember_end, start_of_run
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.checkpoints.start import build_model, head_class, read_weights
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.ema import ModelEMA
from tessera.utils.engine.guard import DivergenceGuard
from tessera.utils.engine.multi_scale import check_statistics, largest_size, multi_scale
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision, choose_precision
from tessera.utils.engine.profile import open_profile
from tessera.utils.engine.recipe import report_recipe, with_recipe
from tessera.utils.engine.schedule import Schedule
from tessera.utils.engine.state import Progress, TrainState
from tessera.utils.engine.step import TrainStep
from tessera.utils.engine.stopping import EarlyStopping
from tessera.utils.errors import UserError
from tessera.utils.evaluation.evaluate import Abandoned, evaluate
from tessera.utils.evaluation.measurement import Settings
from tessera.utils.machine.out_of_memory import explain_out_of_memory
from tessera.utils.ranks.agreement import require_agreement, require_same_command, run_fingerprint
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.failures import run_rank
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.preflight import preflight
from tessera.utils.ranks.signals import Interruption
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.report.console import setup_logging
from tessera.utils.report.epoch_bar import EpochBar
from tessera.utils.report.journal import EpochFigures, Journal
from tessera.utils.report.tables import table_header, validation_line
from tessera.utils.report.trackers.loggers import check_trackers
from tessera.utils.report.validation import report_validation
from tessera.utils.runtime.checkpoint import fused_copy
from tessera.utils.search.autobatch import Trial, auto_batch_size
from tessera.utils.search.evolve import evolve
from tessera.utils.seeding import init_seeds
from tessera.utils.types import DatasetIndex, Metrics

log = logging.getLogger(__name__)

OUT_OF_MEMORY_REMEDIES = (
    "Give a smaller --batch-size (-1 finds the largest that fits), a smaller --imgsz or a smaller model, or free "
    "memory that other processes hold. A saved run resumes with --resume and a smaller --batch-size."
)


def train(config: TrainConfig, hyp: Hyp | None, world: World, resumed: ResumedRun | None = None) -> Metrics:
    """Train, validate and save, epoch by epoch; every rank calls this.

    Args:
        config, hyp: frozen; the same on every rank. Without `hyp` the model's own for the length of the run.
        world: this rank.
        resumed: what to resume; None = a fresh run.

    Returns:
        The metrics of the best epoch.

    Raises:
        UserError: something is wrong with the data, the weights or the folders.
    """
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption("before the first step was done"))
        accelerator = world.accelerator
        context: RunContext | None = None
        stack.enter_context(
            explain_out_of_memory(accelerator, lambda: work_in_words(config, context), OUT_OF_MEMORY_REMEDIES)
        )
        stack.enter_context(accelerator.choosing_kernels(config.deterministic))
        init_seeds(config.seed + 1 + world.rank)
        world.from_main(lambda: check_trackers(config.logger_names))
        # Mistakes in the flags before the dataset is read, which may take minutes.
        folder = resumed.run if resumed else stack.enter_context(new_run(config, world))
        weights = world.from_main(lambda: read_weights(config, resumed))
        world.set_activity("reading the dataset")
        with torch_distributed_zero_first(world.local_rank, world) as verified:  # built and compared once a node
            spec = load_spec(config.data)
            train_index = build_index(spec, "train", single_cls=config.single_cls, verified=verified)
            val_index = build_index(spec, "val", single_cls=config.single_cls, verified=verified)
        warn_of_problems(config.data, train_index, val_index)
        if resumed:
            resumed.check_classes(train_index.names, config)

        world.set_activity("building the model")
        if hyp is None:
            config, hyp = with_recipe(config, head_class(config, train_index.names, weights), len(train_index))
        raw_model = build_model(config, train_index.names, weights, resumed, round(hyp.anchors))
        del weights  # else they would stay in memory for the whole run
        require_agreement(run_fingerprint(config, hyp, {"train": train_index, "val": val_index}, raw_model), world)
        imgsz = raw_model.usable_imgsz(config.imgsz)
        if not resumed:
            raw_model.head.prepare(train_index.box_sizes(imgsz), config, hyp, world)
        raw_model.to(world.device).to(memory_format=accelerator.memory_format)
        log.info(summary(raw_model, imgsz))
        precision = choose_precision(config.amp, world, raw_model, torch.rand(1, 3, imgsz, imgsz, device=world.device))
        criterion = raw_model.head.criterion(hyp, imgsz=imgsz, label_smoothing=config.label_smoothing)
        context = RunContext(config, hyp, world, imgsz, raw_model.stride, folder)
        batch_size = choose_batch_size(context, raw_model, criterion, precision, len(train_index))
        config = dataclasses.replace(config, batch_size=batch_size)  # what AutoBatch chose, a resumed run keeps

        fused, decay = accelerator.fused_optimizers, context.layer_decay
        optimizer = build_optimizer(raw_model, context.optimizer, hyp, batch_size, fused=fused, layer_decay=decay)
        ema, stopper = ModelEMA(raw_model, hyp.ema_share), EarlyStopping(config.patience)
        progress = Progress(torch.zeros(len(criterion.names), device=world.device))
        state = TrainState(raw_model, ema, optimizer, precision, stopper, progress)
        context = dataclasses.replace(context, config=config)
        check_statistics(context)
        memory = SharedMemory(world)
        loader = open_train_loader(context, train_index, memory, stack)
        val_loader = open_val_loader(context, val_index, memory, stack)
        dataset_hash = train_index.content_hash()
        if resumed:
            resumed.restore(state, config, len(train_index), dataset_hash, world)
            world.remember("saved", "yes")
        world.remember("run", str(folder))
        batches = loader.batches_per_epoch
        schedule = Schedule(hyp, config.epochs, batches, batch_size, config.cos_lr)
        report_recipe(context, schedule, raw_model.head, from_scratch=not (config.weights or resumed))

        journal = stack.enter_context(
            Journal(context, train_index, criterion.names, start_epoch=progress.epoch, resumed=resumed is not None)
        )
        journal.graph(raw_model)
        model = smart_DDP(
            raw_model, config.sync_bn, config.compile, dynamic=config.multi_scale or config.rect, world=world
        )
        profile = stack.enter_context(open_profile(config.profile, folder, world))
        step = TrainStep(model, state, criterion, context, multi_scale(context), profile)
        guard = DivergenceGuard(context, train_index, precision.scaler.get_scale)
        saver = stack.enter_context(
            Saver(
                context,
                state,
                dataset_hash,
                interruption,
                settle=lambda: guard.note(step.settle()).stop,
                pixels=spec.pixels,
                has_best=resumed is not None and resumed.has_best,
            )
        )
        preflight(world, folder)
        if config.compile:
            log.info("--compile: the first steps may take minutes: kernels are built.")
        log.info(f"{precision.name}, {batch_size} images a batch; writing to {folder}")

        for epoch in range(progress.epoch, config.epochs):
            started, last = time.perf_counter(), epoch + 1 == config.epochs
            world.set_activity(f"training epoch {epoch}")
            reweight(loader, train_index, progress, config)
            raw_model.train()
            first = progress.step_in_epoch
            with EpochBar(f"{epoch}/{config.epochs - 1}", batches, world, criterion.names, start=first) as bar:
                stream = accelerator.in_advance(journal.watch(bar.timed(profile.waited(loader.batches(epoch, first)))))
                while progress.step_in_epoch < batches:
                    iteration = epoch * batches + progress.step_in_epoch
                    window = schedule.window(iteration)
                    schedule.apply(optimizer, iteration + window - 1)
                    result = step(itertools.islice(stream, window), window, interruption.asked)
                    interruption.defer()  # from now on there is something to save
                    bar.update(window, progress.mean_losses() * world.size, result.objects, imgsz)
                    guard.note(result.flags)
                    saver.after_step(result.flags.stop)
                    profile.step()
                interruption.defer()  # also where the stopped run had done the epoch's last step
                saver.settle()
            trained = (batches - first) * batch_size / bar.seconds
            losses = world.sum(progress.mean_losses().to(world.device))

            metrics = None
            if last or not config.noval:
                val_loader.begin()  # before a file is written: no process may be forked then
                saver.before_validation()
                world.set_activity(f"validating epoch {epoch}")
                with profile.stage("validation"):
                    averaged = fused_copy(ema.model, accelerator)
                    sinks = journal.watching(val_index, epoch)
                    settings = Settings(try_half=True, asked_to_stop=interruption.asked)
                    try:
                        found = evaluate(averaged, val_loader, world, settings, criterion=criterion, sinks=sinks)
                    except Abandoned:
                        saver.stop_validation()
                    metrics = found.metrics
                progress.class_maps = metrics.class_maps()
                log.info(f"{table_header()}\n{validation_line(metrics)}")
            stop = world.broadcast(metrics is not None and stopper.update(epoch, metrics.fitness))
            is_best = metrics is not None and stopper.best_epoch == epoch
            progress.finish_epoch()
            with profile.stage("plots"):
                rates = schedule.learning_rates((epoch + 1) * batches - 1)
                seconds = time.perf_counter() - started
                figures = EpochFigures(losses.tolist(), metrics, rates, seconds, bar.data_wait, trained)
                journal.epoch(epoch, figures)
            with profile.stage("saving"):
                save, done = last or stop or not config.nosave, last or stop
                saver.after_epoch(epoch, metrics, save=save, is_best=is_best, done=done)
            profile.epoch(epoch, time.perf_counter() - started)
            if stop:
                log.info(f"Stopped early: no better epoch in the last {config.patience}.")
                break
        interruption.act_at_once(f"after the last epoch, whose checkpoint is saved; val.py measures {saver.best}")
        world.set_activity("measuring the best epoch")
        return finish(context, raw_model, val_loader, saver, journal, stopper.best_epoch)


# -------------------------------------------------------------------------------------------- parts of a run


def warn_of_problems(data: str, *indexes: DatasetIndex) -> None:
    """Warn of what is wrong with the data, such as images that the scans left out."""
    texts = list(itertools.chain.from_iterable(map(doubts, indexes)))
    for text in texts + [f"`train.py --data {shlex.quote(data)} --check-data` lists every one."] * bool(texts):
        log.warning(text)


def choose_batch_size(
    context: RunContext, model: DetectionModel, criterion: Criterion[Any], precision: Precision, most: int
) -> int:
    """Images a global batch: as asked, or by AutoBatch, which does not exceed `most`."""
    if context.batch_size > 0:
        return context.batch_size
    size = largest_size(context.imgsz, context.stride) if context.config.multi_scale else context.imgsz
    return auto_batch_size(Trial(context, model, criterion, precision, size), most, context.world)


def work_in_words(config: TrainConfig, context: RunContext | None) -> str:
    """What takes the memory, for a message: the batch of a rank; the model where that is not known yet."""
    if context is None or context.batch_size < 1:
        return f"the model at {config.imgsz} px, before its first batch"
    scale = f" (up to {largest_size(context.imgsz, context.stride)} px)" if config.multi_scale else ""
    return f"a batch of {context.rank_batch_size} images a rank at {context.imgsz} px{scale}"


def open_train_loader(context: RunContext, index: DatasetIndex, memory: SharedMemory, stack: ExitStack) -> TrainLoader:
    """Images and stream of the training, closed by `stack`."""
    store = open_images(index, context.imgsz, context.config.cache, "linear", context.world, memory)
    return stack.enter_context(build_train_loader(context, stack.enter_context(store), memory))


def open_val_loader(context: RunContext, index: DatasetIndex, memory: SharedMemory, stack: ExitStack) -> ValLoader:
    """Images of the validation and this rank's share of them, closed by `stack`."""
    cache: CacheMode = "none" if context.config.noval else context.config.cache
    store = stack.enter_context(open_images(index, context.imgsz, cache, "area", context.world, memory))
    return stack.enter_context(
        build_val_loader(
            store,
            context.world,
            batch_size=2 * context.rank_batch_size,  # without gradients twice as many fit
            stride=context.stride,
            workers=context.config.workers,
            memory=memory,
        )
    )


def reweight(loader: TrainLoader, index: DatasetIndex, progress: Progress, config: TrainConfig) -> None:
    """`--image-weights`: sample images of weak classes more often from this epoch on."""
    if config.image_weights:
        loader.reweight(image_weights(index, progress.class_maps or np.zeros(len(index.names))))


def finish(
    context: RunContext, model: DetectionModel, loader: ValLoader, saver: Saver, journal: Journal, best: int | None
) -> Metrics:
    """Measure the best checkpoint once more, with its tables and pictures, and say where everything lies."""
    world, index = context.world, loader.index
    model.load_state_dict(world.from_main(lambda: load_weights(saver.best).state_dict))
    sinks = journal.watching(index)
    found = evaluate(fused_copy(model, world.accelerator), loader, world, sinks=sinks)
    if world.is_main:
        epoch = "No epoch has a finite fitness" if best is None else f"Best epoch {best}"
        print(f"\n{epoch}; measured again from {saver.best}")
        report_validation(
            found, index, context.folder, imgsz=context.imgsz, verbose=len(index.names) <= 20, plots=journal.renders
        )
        if not (context.config.nosave and context.config.noval):  # as the trials of a search, of which no weights stay
            print(f"Detect: uv run detect.py --weights {shlex.quote(str(saver.best))} --source …")
            print(f"Export: uv run export.py --weights {shlex.quote(str(saver.best))}")
    journal.finish(best or 0, saver.best)
    world.barrier()
    return found.metrics


# ------------------------------------------------------------------------------------------------- the command


def start(given: Mapping[str, Any]) -> Metrics | None:
    """Join the job and do what the flags ask for; every rank."""
    asked = TrainConfig(**given)
    batch_size = 0 if asked.resume else asked.batch_size
    with open_world(asked.device, asked.local_rank, batch_size, call_in_words(asked)) as world:
        setup_logging(world.rank, world.size)
        require_same_command(asked, world)
        if asked.check_data:
            check_data(asked, world)
            return None
        if ended := recall_end(world):
            return ended[0]
        if asked.evolve:
            metrics = evolve(*start_of_search(asked, world), world, train)
        else:
            config, hyp, resumed = start_of_run(given, asked, world)
            metrics = train(config, hyp, world, resumed)
        remember_end(metrics, world)
        return metrics


def start_of_search(config: TrainConfig, world: World) -> tuple[TrainConfig, Hyp]:
    """`--evolve`: the hyperparameters of the first training, as asked for or the model's own; every rank."""
    if config.hyp:
        return config, load_hyp(config.hyp)
    weights = world.from_main(lambda: read_weights(config, None))
    world.set_activity("reading the dataset")
    with torch_distributed_zero_first(world.local_rank, world) as verified:
        index = build_index(load_spec(config.data), "train", single_cls=config.single_cls, verified=verified)
    return with_recipe(config, head_class(config, index.names, weights), len(index))


def check_data(config: TrainConfig, world: World) -> None:
    """`--check-data`: print every problem of the dataset.

    Raises:
        UserError: training would not be safe.
    """
    checked = world.from_main(
        lambda: check_dataset(load_spec(config.data), config.single_cls, imgsz=config.imgsz, progress=True)
    )
    if world.is_main:
        print("\n".join(checked.lines()))
    if not checked.safe:
        raise UserError(
            f"--check-data: {config.data} has {len(checked.errors)} error(s), listed above. Fix them first."
        )


def run(**kwargs: Any) -> Metrics | None:
    """Train from Python; takes the names of the flags. Returns the metrics of the best epoch.

    Raises:
        UserError: a mistake in the flags, the data, the weights or the folders.
    """
    return start(TrainConfig.named(kwargs))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    code, _ = run_rank(lambda: start(TrainConfig.from_args(arguments)))
    return code


if __name__ == "__main__":
    end_process(main())
