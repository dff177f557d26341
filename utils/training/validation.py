"""Validations of a training: of the initial weights, after each epoch, and of the best checkpoint; and its result."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.data.feed.loader import ValLoader
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import TrainConfig
from tessera.utils.engine.profile import NoProfile
from tessera.utils.engine.state import INITIAL, Training
from tessera.utils.evaluation.evaluate import Evaluation, EvaluationStopped, Settings, evaluate
from tessera.utils.evaluation.network import ImageDetector, Network, fused_copy, network_of
from tessera.utils.extensions import extension
from tessera.utils.flags.objective import Metric, parse_objective
from tessera.utils.flags.program import started
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.report.console import TrainingResult, table_header, validation_line
from tessera.utils.report.observers import Observers, RunResult
from tessera.utils.text import plural
from tessera.utils.training.setup import OUT_OF_MEMORY_REMEDIES
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)


class Validated(NamedTuple):
    """Metrics of an epoch, and the value of `--metric`; equal on every rank. None without a validation."""

    metrics: Metrics | None = None
    score: float | None = None


class Validation:
    """Validation of the EMA during a training; every rank calls its methods.

    Args:
        training: the run.
        loader: this rank's part of the validation images.
        saver: saves last.pt of a run stopped here, which resumes with this validation.
    """

    def __init__(
        self,
        training: Training,
        loader: ValLoader,
        saver: Saver,
        observers: Observers,
        profile: NoProfile,
        stop_signals: StopSignals,
    ) -> None:
        self._context, self._state, self._criterion = training.context, training.state, training.criterion
        self._loader, self._saver, self._observers = loader, saver, observers
        self._profile, self._stop_signals = profile, stop_signals
        self._metric = parse_objective(training.context.config.metric)
        self._last: Evaluation | None = None  # of the last epoch
        self._metrics: Metrics | None = None  # of the latest validation

    def before_training(self) -> None:
        """Validate the initial weights if they know all classes: they may stay the best."""
        context = self._context
        if context.pretraining != "known" or context.resumed or context.config.noval or context.config.nosave:
            return
        context.world.set_activity("validating the initial weights")
        self._loader.begin()
        settings = Settings(boxes=False)  # until the first step a stop signal acts immediately
        evaluation = self._evaluate(self._state.ema.model, settings)
        log.info(f"Before training:\n{table_header()}\n{validation_line(evaluation.metrics)}")
        self._state.stopper.update(INITIAL, self._score(evaluation))
        self._saver.before_training(evaluation.metrics)

    def after_epoch(self, epoch: int) -> Validated:
        """Return the metrics and the score of `epoch`, from 0; nothing with --noval, except for the last epoch.

        The last epoch also returns boxes, as `validate_best` does, which can then reuse it.

        Raises:
            UserError: last.pt could not be written; on every rank.
            Interrupted: a rank received a stop signal; last.pt is written. On every rank.
        """
        world, config = self._context.world, self._context.config
        is_last = epoch + 1 == config.epochs
        if config.noval and not is_last:
            return Validated()
        settings = Settings(stop_requested=self._stop_signals.stop_requested, boxes=is_last)
        self._loader.begin()  # forks workers, which must not happen during a write
        self._saver.before_validation()
        world.set_activity(f"validating epoch {epoch}")
        with self._profile.stage("validation"):
            criterion, collectors = None if config.tile else self._criterion, self._observers.collectors(epoch)
            try:
                evaluation = self._evaluate(self._state.ema.model, settings, criterion=criterion, collectors=collectors)
            except EvaluationStopped:
                self._saver.stop_validation()
        self._last, self._metrics = evaluation if is_last else None, evaluation.metrics
        score = self._score(evaluation)
        self._state.progress.class_maps = evaluation.metrics.class_maps()
        log.info(f"{table_header()}\n{validation_line(evaluation.metrics)}{self._shown(score)}")
        self._observers.validation(epoch, evaluation, score)
        return Validated(evaluation.metrics, score)

    def validate_best(self) -> TrainingResult:
        """Validate the best checkpoint, end the observers, and log how to use it.

        If it has the weights of the last epoch, bit by bit, the last evaluation is reused.
        """
        context, best, epoch, model = self._context, self._saver.best, self._best_epoch(), self._state.model
        context.world.set_activity("validating the best epoch")
        model.load_state_dict(context.world.run_on_main(lambda: load_weights(best).state_dict))
        evaluation = self._last_evaluation_of(model)
        source = f"; validated in the last epoch: {best}" if evaluation else f"; validated again: {best}"
        if evaluation is None:
            evaluation = self._evaluate(model, collectors=self._observers.collectors(None))
        score = self._score(evaluation)
        if context.world.is_main:
            none = {None: "No epoch has a finite fitness", INITIAL: "No epoch is better than the initial weights"}
            which = "Last" if best.name == "last.pt" else "Best"
            print(f"\n{none.get(epoch, f'{which} epoch {epoch}')}{self._shown(score)}{source}")
        self._observers.end(RunResult(best, max(epoch or 0, 0), evaluation))
        if context.world.is_main:
            config = context.config
            tiles = f" --tile {config.tile} --overlap {config.overlap:g}" if config.tile else ""
            weights = f"--weights {shlex.quote(str(best))}{config.own_part_flags('head')}"
            print(f"Detect: {started('detect.py')} {weights} --source …{tiles}")
            print(f"Export: {started('export.py')} {weights}")
        context.world.barrier()
        return self._result(evaluation.metrics)

    def of_trial(self) -> TrainingResult:
        """Return the result of a training of a search: its last epoch counts."""
        return self._result(self._metrics)

    def _result(self, metrics: Metrics | None) -> TrainingResult:
        config, epochs, best = self._context.config, self._state.progress.epoch, self._best_epoch()
        stopped = self._state.stopper.has_stopped(epochs)
        best = None if best == INITIAL else best
        return TrainingResult(metrics, self._context.folder, config.data, epochs, best, stopped)

    def _last_evaluation_of(self, model: DetectionModel) -> Evaluation | None:
        """Return the last evaluation, without losses, if every rank evaluated the weights of `model`; else None."""
        saved, last = model.state_dict(), self._state.ema.model.state_dict()
        same = self._last is not None and all(torch.equal(saved[name], last[name]) for name in saved)
        if self._last is None or not all(self._context.world.all_gather(same)):
            return None
        return dataclasses.replace(self._last, metrics=dataclasses.replace(self._last.metrics, losses=()))

    def _best_epoch(self) -> int | None:
        """Return the epoch of `saver.best`, which is the last one where there is no best.pt, as with --nosave."""
        last, best = self._state.progress.epoch - 1, self._state.stopper.best_epoch
        return last if best is not None and self._saver.best.name == "last.pt" else best

    def _score(self, evaluation: Evaluation) -> float:
        """Return the value of `--metric`, on every rank; rank 0 alone has the curves."""
        return self._context.world.run_on_main(lambda: self._metric.value(lambda metric: metric_of(evaluation, metric)))

    def _shown(self, score: float) -> str:
        metric = self._context.config.metric
        return "" if metric == TrainConfig.metric else f" ({metric} {score:.4g})"

    def _evaluate(self, model: DetectionModel, settings: Settings | None = None, **others: Any) -> Evaluation:
        """Evaluate a fused copy of the model, with `--tile` as val.py does; arguments as of `evaluate`."""
        context, accelerator = self._context, self._context.world.accelerator
        work = f"a validation batch of {plural(context.val_batch_size, 'image')} a rank at {context.imgsz} px"
        with explain_out_of_memory(accelerator, work, OUT_OF_MEMORY_REMEDIES):
            network: Network | ImageDetector = network_of(fused_copy(model, accelerator), context.imgsz, accelerator)
            if context.config.tile:
                tiles = context.imgsz, context.config.tile, context.config.overlap
                network = extension("tiles").image_detector(network, *tiles)
            return evaluate(network, self._loader, context.world, settings, **others)


def metric_of(evaluation: Evaluation, metric: Metric) -> float:
    """Return a metric of a validation, on rank 0, which has the curves.

    `recall@p=x` is the highest recall with a precision of at least x, at a threshold per class, as the mean over the
    classes; 0 for a class that never reaches x. `precision@r=x` likewise. `f1` is the mean over the classes at the best
    common threshold, `ms` the total milliseconds per image.
    """
    metrics, curves = evaluation.metrics, evaluation.curves
    if metric.at is not None:
        axes = {"recall@p": (curves.recall, curves.precision), "precision@r": (curves.precision, curves.recall)}
        raised, bound = axes[metric.name]
        return float(np.where(bound >= metric.at, raised, 0.0).max(1).mean()) if len(raised) else 0.0
    if metric.name == "f1":
        return float(curves.f1[:, curves.best].mean()) if len(curves.f1) else 0.0
    if metric.name == "ms":
        return sum(metrics.speed_ms)
    return float(getattr(metrics, metric.name))
