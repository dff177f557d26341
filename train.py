"""Train a detector.

    uv run train.py --data shapes.yaml --epochs 20                                      # one process
    uv run torchrun --standalone --nproc-per-node 2 train.py --data coco128.yaml --weights yolov5n.pt
    uv run torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 train.py --data coco.yaml
    uv run train.py --resume                                                            # the newest run
    uv run train.py --resume runs/train/exp/weights/last.pt --epochs 200                # more epochs
    uv run train.py --resume auto --name night --data coco128.yaml                      # start or resume

Every rank runs every line; `world` and `observers` hide the difference. The randomness of a sample is a function of
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
from importlib import import_module
from pathlib import Path
from typing import Any

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.extensions import extension
from tessera.utils.flags.program import called
from tessera.utils.flags.signature import documented
from tessera.utils.ranks.failures import StopSignals, run_command
from tessera.utils.startup import check_command_line


def before_torch(flags: TrainConfig) -> None:
    """Run `--check-data`, and exit; for a new run, check its dataset YAML."""
    if flags.check_data:
        sys.exit(run_command(TrainConfig, sys.argv[1:], lambda _: extension("dataset checks").check_data(flags)))
    if not flags.resume:  # imported late: --help does without NumPy
        import_module("tessera.data.source.dataset_yaml").read_dataset_yaml(flags.data)


if __name__ == "__main__":
    check_command_line(TrainConfig, before_torch)

from tessera.utils.checkpoints.resume import ResumedRun
from tessera.utils.checkpoints.run_directory import new_run
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.engine.optimizer import Schedule
from tessera.utils.engine.profile import open_profile
from tessera.utils.engine.recipe import report_recipe
from tessera.utils.engine.step import TrainStep
from tessera.utils.errors import UserError
from tessera.utils.ranks.consistency import describe_call, require_same_command
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.report.console import EpochBar, TrainingResult, setup_logging
from tessera.utils.report.observers import EpochResult, Observer, Observers, own_observers
from tessera.utils.report.results_csv import RunFiles
from tessera.utils.text import plural, row
from tessera.utils.training.data import SlowLoaderWarning, open_loaders, reweight
from tessera.utils.training.divergence import DivergenceGuard
from tessera.utils.training.resume_target import recall_result, remember_result, resume_target
from tessera.utils.training.setup import explain_batch_memory, init_seeds, set_up
from tessera.utils.training.validation import Validation
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)


def train(
    flags: TrainConfig,
    hyp: Hyp | None,
    world: World,
    resumed: ResumedRun | None = None,
    folder: Path | None = None,
    trial: Observer | None = None,
) -> TrainingResult:
    """Train, validate and save, epoch by epoch; return the result. Every rank calls this.

    Args:
        flags, hyp, world: flags, hyperparameters (None = chosen by model, start and length), and ranks.
        resumed, folder: the run to resume, and its directory, whose lock is held; None = a new run, a new directory.
        trial: observer of a search, in place of the report: the last epoch then counts, and no checkpoint is used.

    Raises:
        UserError: invalid data, weights or directories.
        Interrupted: on every rank, after a stop signal to one. A trial raises its own.
    """
    with ExitStack() as stack:
        stop_signals = stack.enter_context(StopSignals("before the first step was done"))
        stack.enter_context(world.accelerator.deterministic_kernels(flags.deterministic))
        init_seeds(flags.seed + 1 + world.rank)
        if not world.accelerator.is_host:
            gc.collect()  # the cycles of an earlier model in this process hold memory of the device

        observers = Observers(observers_of(flags, world, trial), world)
        training = set_up(flags, hyp, world, resumed, folder or stack.enter_context(new_run(flags, world)))
        context, data, state = training.context, training.data, training.state
        stack.enter_context(explain_batch_memory(context))
        loader, val_loader = open_loaders(context, data, stack)
        if resumed:
            resumed.restore(state, context.config, data.images_per_epoch, data.train_hash, world)
            world.remember("saved", "yes")
        world.remember("run", str(context.folder))
        progress, batches = state.progress, loader.batches_per_epoch
        schedule = Schedule(context.hyp, context.config.epochs, batches, context.batch_size, context.config.cos_lr)
        report_recipe(context, schedule, state.model.head)

        stack.enter_context(observers.of(training))
        profile = stack.enter_context(open_profile(context.config.profile, context.folder, world))
        world.barrier()  # rank 0 has opened trackers: the device's collectives must not wait for that
        model = smart_DDP(state.model, flags.sync_bn, flags.compile, dynamic=context.varies_sizes, world=world)
        step = TrainStep(model, state, training.criterion, context, profile, observers.step, training.teach)
        saver = Saver(context, state, data.train_hash, data.spec.pixels, stop_signals, step.flush)
        stack.enter_context(world.advising(str if trial else saver.resume_line))
        stack.enter_context(saver)
        validation = Validation(training, val_loader, saver, observers, profile, stop_signals)
        log.info(row("Device", world.describe()))
        log.info(row("Output", f"{context.folder} ({state.precision.name}, batch size {context.batch_size})"))

        validation.before_training()
        for epoch in state.epochs_left(context.config.epochs):
            began = time.perf_counter()
            world.set_activity(f"training epoch {epoch}")
            reweight(loader, data.train, progress, context.config)
            state.model.train()
            with EpochBar(epoch, batches, training) as bar:
                stream = bar.timed(profile.waited(loader.batches(epoch, progress.batch_in_epoch)))
                stream = world.accelerator.prefetch(observers.batches(stream))
                while progress.batch_in_epoch < batches:
                    iteration = epoch * batches + progress.batch_in_epoch
                    window = schedule.window(iteration)
                    schedule.apply(state.optimizer, iteration + window - 1)
                    result = step(itertools.islice(stream, window), window, stop_signals.stop_requested)
                    stop_signals.defer()  # from now on a signal ends in a checkpoint
                    bar.update(window, progress.mean_losses() * world.size, result.objects, context.imgsz)
                    saver.after_step(result.flags.stop)
                    profile.step()
                stop_signals.defer()  # also if the resumed run had finished the epoch's steps
                saver.flush()
            losses = world.sum(progress.mean_losses().to(world.device)).tolist()
            found = validation.after_epoch(epoch)
            stop = world.broadcast(state.stopper.update(epoch, found.score))
            progress.finish_epoch()
            rates = schedule.learning_rates((epoch + 1) * batches - 1)
            times = time.perf_counter() - began, bar.data_wait, bar.batches_per_s * context.batch_size
            with profile.stage("plots"):
                observers.epoch(EpochResult(epoch, losses, found.metrics, rates, *times))
            with profile.stage("saving"):
                saver.after_epoch(epoch, found.metrics, is_best=state.stopper.best_epoch == epoch, stop=stop)
            profile.epoch(epoch, time.perf_counter() - began)
            if stop:
                log.info(f"Stopped early: no improvement in the last {plural(state.stopper.patience, 'epoch')}.")
                break
        stop_signals.stop_immediately(
            f"after the last epoch, whose checkpoint is saved; validate {saver.best} with "
            f"{called('val.py')}{context.config.own_part_flags('head')}"
        )
        return validation.of_trial() if trial else validation.validate_best()


def observers_of(flags: TrainConfig, world: World, trial: Observer | None) -> list[Observer]:
    """Return the observers of a training, in order; `trial` as of `train`.

    Raises:
        ConfigError: a tracker or a part of the user's own cannot be used; on every rank.
    """
    trackers = analysis_observer("trackers", "Trackers", world)
    world.run_on_main(lambda: [tracker.require(flags.logger_names) for tracker in trackers])
    # The report first: trackers take its charts, and it closes last, which marks the run as evaluated.
    first = [trial] if trial else analysis_observer("validation report", "TrainingReport", world)
    plots = [] if flags.noplots else analysis_observer("plots", "Plots", world)
    watching = DivergenceGuard(), SlowLoaderWarning()
    return [*first, *watching, RunFiles(), *plots, *trackers, *own_observers(flags.callbacks)]


def analysis_observer(part: str, name: str, world: World) -> list[Any]:
    """Return the observer of an extension on rank 0; none, with a warning, where this installation lacks it."""
    try:
        return [getattr(extension(part), name)()] if world.is_main else []
    except UserError as error:
        log.warning(f"{error} The training runs without.")
        return []


# ------------------------------------------------------------------------------------------------- the command


def join(given: Mapping[str, Any]) -> TrainingResult:
    """Join the job and run what the flags name; every rank calls this."""
    flags = TrainConfig(**given)
    batch_size = 0 if flags.resume else flags.batch_size
    with open_world(flags.device, flags.local_rank, batch_size, describe_call(flags)) as world, ExitStack() as stack:
        setup_logging(world.rank, world.size)
        require_same_command(flags, world)
        if flags.check_data:
            checked: TrainingResult = world.run_on_main(lambda: extension("dataset checks").check_data(flags))
            return checked
        if ended := recall_result(world):
            return ended
        result = TrainingResult()
        if flags.evolve:
            result = extension("search").evolve(flags, world, train)
        elif target := resume_target(given, world, stack):
            result = train(target.config, target.hyp, world, target.resumed, target.folder)
        remember_result(result, world)
        return result


@documented(TrainConfig)
def run(**kwargs: Any) -> Metrics | None:
    """Train from Python with the names of the flags; return the metrics of the best epoch.

    None for `check_data`, and if the run of `resume="auto"` is finished.

    Raises:
        UserError: invalid flags, data, weights or directories.
    """
    return join(TrainConfig.named(kwargs)).metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command(TrainConfig, sys.argv[1:] if argv is None else argv, join)


if __name__ == "__main__":
    sys.exit(main())
