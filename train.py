"""Train a detector.

    uv run train.py --data shapes.yaml --epochs 20                                      # one process
    uv run torchrun --standalone --nproc-per-node 2 train.py --data coco128.yaml --weights yolov5n.pt
    uv run torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 train.py --data coco.yaml
    uv run train.py --resume                                                            # the newest run
    uv run train.py --resume runs/train/exp/weights/last.pt --epochs 200                # more epochs
    uv run train.py --resume auto --name night --data coco128.yaml                      # start or resume

Every rank runs every line; `world` and `recorder` hide the difference. The randomness of a sample is a function of
(seed, epoch, position), and the schedule one of the iteration. A run can therefore be resumed on any number of ranks.

From Python: `tessera.train(data="shapes.yaml", epochs=20)` accepts the names of the flags.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tessera.utils.config import Hyp, TrainConfig, given_hyp
from tessera.utils.flags.program import called
from tessera.utils.flags.signature import documented
from tessera.utils.startup import check_command_line

if __name__ == "__main__":
    check_command_line(TrainConfig)

from tessera.analysis.checks.run_checks import check_dataset
from tessera.analysis.report.data_page import write_data_page
from tessera.analysis.search import TrialObserver, evolve, unread_keys
from tessera.data.source.dataset_yaml import load_spec
from tessera.utils.checkpoints.initial_model import head_class, pretraining_of, read_weights
from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.engine.divergence import DivergenceGuard
from tessera.utils.engine.profile import open_profile
from tessera.utils.engine.recipe import report_recipe, resolve_auto_weights, with_recipe
from tessera.utils.engine.schedule import Schedule
from tessera.utils.engine.step import TrainStep
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import user_path
from tessera.utils.ranks.consistency import describe_call, require_same_command
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.failures import StopSignals, run_command
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.report.console import setup_logging
from tessera.utils.report.epoch_bar import EpochBar
from tessera.utils.report.run_recorder import EpochMetrics, RunRecorder
from tessera.utils.seeding import init_seeds
from tessera.utils.text import plural, row
from tessera.utils.training.data import load_data, open_loaders, reweight
from tessera.utils.training.result import TrainingResult, recall_result, remember_result
from tessera.utils.training.resume_target import resume_target
from tessera.utils.training.start import open_run
from tessera.utils.training.validation import Validation
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)


def train(
    flags: TrainConfig,
    hyp: Hyp | None,
    world: World,
    resumed: ResumedRun | None = None,
    folder: Path | None = None,
    watch: TrialObserver | None = None,
) -> TrainingResult:
    """Train, validate and save, epoch by epoch; return the result. Every rank calls this.

    Args:
        flags, hyp, world: flags, hyperparameters (None = chosen by model, start and length), and ranks.
        resumed, folder: the run to resume, and its directory, whose lock is held; None = a new run, a new directory.
        watch: observer of a search.

    Raises:
        UserError: invalid data, weights or directories.
        Interrupted, Pruned: on every rank, after a stop signal to one, or if the search ends this training.
    """
    with ExitStack() as stack:
        stop_signals = stack.enter_context(StopSignals("before the first step was done"))
        stack.enter_context(world.accelerator.deterministic_kernels(flags.deterministic))
        init_seeds(flags.seed + 1 + world.rank)
        if not world.accelerator.is_host:
            gc.collect()  # the cycles of an earlier model in this process hold memory of the device

        run, data, state, criterion = open_run(flags, hyp, world, resumed, folder, stack)
        loader, val_loader = open_loaders(run, data, stack)
        if resumed:
            resumed.restore(state, run.config, data.images_per_epoch, data.train_hash, world)
            world.remember("saved", "yes")
        world.remember("run", str(run.folder))
        progress, batches = state.progress, loader.batches_per_epoch
        schedule = Schedule(run.hyp, run.config.epochs, batches, run.batch_size, run.config.cos_lr)
        report_recipe(run, schedule, state.model.head)

        recorder = stack.enter_context(RunRecorder(run, data.train, criterion.names, start_epoch=progress.epoch))
        profile = stack.enter_context(open_profile(run.config.profile, run.folder, world))
        world.barrier()  # rank 0 has opened trackers: the device's collectives must not wait for that
        model = smart_DDP(state.model, run.config.sync_bn, run.config.compile, dynamic=run.varies_sizes, world=world)
        step = TrainStep(model, state, criterion, run, profile)
        guard = DivergenceGuard(run, data.train, criterion, state.precision.scaler.get_scale)
        saver = Saver(
            run, state, data.train_hash, data.spec.pixels, stop_signals, lambda: guard.note(step.flush()).stop
        )
        stack.enter_context(world.advising(saver.resume_line if watch is None else str))
        stack.enter_context(saver)
        validation = Validation(run, state, val_loader, criterion, saver, recorder, profile, stop_signals, watch)
        log.info(row("Device", world.describe()))
        log.info(row("Output", f"{run.folder} ({state.precision.name}, batch size {run.batch_size})"))

        validation.before_training()
        for epoch in state.epochs_left(run.config.epochs):
            started = time.perf_counter()
            world.set_activity(f"training epoch {epoch}")
            reweight(loader, data.train, progress, run.config)
            state.model.train()
            with EpochBar(
                f"{epoch}/{run.config.epochs - 1}", batches, world, criterion.names, progress.batch_in_epoch
            ) as bar:
                stream = bar.timed(profile.waited(loader.batches(epoch, progress.batch_in_epoch)))
                stream = world.accelerator.prefetch(recorder.save_first_batches(stream))
                while progress.batch_in_epoch < batches:
                    iteration = epoch * batches + progress.batch_in_epoch
                    window = schedule.window(iteration)
                    schedule.apply(state.optimizer, iteration + window - 1)
                    result = step(itertools.islice(stream, window), window, stop_signals.stop_requested)
                    stop_signals.defer()  # from now on a signal ends in a checkpoint
                    bar.update(window, progress.mean_losses() * world.size, result.objects, run.imgsz)
                    guard.note(result.flags)
                    saver.after_step(result.flags.stop)
                    profile.step()
                stop_signals.defer()  # also if the resumed run had finished the epoch's steps
                saver.flush()
            losses = world.sum(progress.mean_losses().to(world.device))
            metrics = validation.after_epoch(epoch)
            stop = world.broadcast(state.stopper.update(epoch, metrics.fitness if metrics else None))
            guard.after_epoch(epoch, losses.tolist(), metrics, state.stopper)
            progress.finish_epoch()
            with profile.stage("plots"):
                times = time.perf_counter() - started, bar.data_wait, bar.batches_per_s * run.batch_size
                recorder.epoch(
                    epoch,
                    EpochMetrics(losses.tolist(), metrics, schedule.learning_rates((epoch + 1) * batches - 1), *times),
                )
            with profile.stage("saving"):
                saver.after_epoch(epoch, metrics, is_best=state.stopper.best_epoch == epoch, stop=stop)
            profile.epoch(epoch, time.perf_counter() - started)
            if stop:
                log.info(f"Stopped early: no improvement in the last {plural(state.stopper.patience, 'epoch')}.")
                break
        stop_signals.stop_immediately(
            f"after the last epoch, whose checkpoint is saved; validate {saver.best} with {called('val.py')}"
        )
        return validation.validate_best(data)


# ------------------------------------------------------------------------------------------------- the command


def start(given: Mapping[str, Any]) -> TrainingResult:
    """Join the job and run what the flags name; every rank calls this."""
    config = TrainConfig(**given)
    if config.overlap != TrainConfig.overlap and not (config.tile or config.resume):
        raise ConfigError("--overlap without --tile has no effect. Give --tile, or omit --overlap.")
    batch_size = 0 if config.resume else config.batch_size
    with open_world(config.device, config.local_rank, batch_size, describe_call(config)) as world, ExitStack() as stack:
        setup_logging(world.rank, world.size)
        require_same_command(config, world)
        if config.check_data:
            return check_data(config, world)
        if ended := recall_result(world):
            return ended
        ended = TrainingResult()
        if config.evolve:
            ended = (evolve(*start_of_search(config, world), world, train) or ended).as_search_result()
        elif begun := resume_target(given, world, stack):
            ended = train(begun.config, begun.hyp, world, begun.resumed, begun.folder)
        remember_result(ended, world)
        return ended


def start_of_search(config: TrainConfig, world: World) -> tuple[TrainConfig, Hyp, frozenset[str]]:
    """Return flags and hyperparameters for the first training of `--evolve`, and those hyperparameters that none reads.

    Every rank calls this.
    """
    given_hyp(config.hyp)  # this and the weights name their errors before the dataset is read
    weights = world.run_on_main(lambda: read_weights(config, None))
    data = load_data(config, world)
    config = resolve_auto_weights(config, len(data.images))
    weights = weights or world.run_on_main(lambda: read_weights(config, None))
    names, images = data.train.names, data.images_per_epoch
    head = head_class(config, names, weights)
    config, hyp = with_recipe(config, head, pretraining_of(config, names, weights), images)
    return config, hyp, unread_keys(hyp, config, head, data.train, images)


def check_data(config: TrainConfig, world: World) -> TrainingResult:
    """Print every problem of the dataset for `--check-data`, and with `--tile` the number of tiles.

    Raises:
        UserError: the dataset has errors, or the page of `--report` cannot be written.
    """
    checked = world.run_on_main(lambda: check_dataset(load_spec(config.data), config.single_cls, imgsz=config.imgsz))
    if world.is_main:
        print("\n".join(checked.lines()))
    found = checked.as_dict()
    if config.report:
        folder = user_path(config.report, "--report")
        page = world.run_on_main(lambda: write_data_page(checked, load_spec(config.data), folder))
        if world.is_main:
            print(f"Report: {page}")
    if checked.errors:
        raise UserError(
            f"--check-data: {config.data} has {plural(len(checked.errors), 'error')}, listed above. Fix them first.",
            details={"checked": found},
        )
    if config.tile:
        load_data(config, world)
    return TrainingResult(data=config.data, checked=found, exit_code=checked.exit_code)


@documented(TrainConfig)
def run(**kwargs: Any) -> Metrics | None:
    """Train from Python with the names of the flags; return the metrics of the best epoch.

    None for `check_data`, and if the run of `resume="auto"` is finished.

    Raises:
        UserError: invalid flags, data, weights or directories.
    """
    return start(TrainConfig.named(kwargs)).metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command(TrainConfig, sys.argv[1:] if argv is None else argv, start)


if __name__ == "__main__":
    sys.exit(main())
