"""Validations of a training: of the initial weights, after each epoch, and of the best checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import logging
import shlex
from dataclasses import dataclass
from typing import Any

import torch

from tessera.analysis.report.page_data import RunInfo
from tessera.analysis.report.validation_report import report_errors, report_validation
from tessera.analysis.search import Pruned, TrialObserver
from tessera.data.feed.loader import ValLoader
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.profile import NoProfile
from tessera.utils.engine.state import TrainState
from tessera.utils.engine.stopping import START
from tessera.utils.evaluation.evaluate import Evaluation, EvaluationStopped, Settings, evaluate
from tessera.utils.evaluation.network import ImageDetector, Network, fused_copy, network_of
from tessera.utils.extensions import extension
from tessera.utils.flags.program import started
from tessera.utils.machine.accelerator import explain_out_of_memory
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.report.console import table_header, validation_line
from tessera.utils.report.results_csv import read_results
from tessera.utils.report.run_recorder import RunRecorder
from tessera.utils.text import plural
from tessera.utils.training.data import TrainingData
from tessera.utils.training.result import TrainingResult
from tessera.utils.training.start import OUT_OF_MEMORY_REMEDIES
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)


@dataclass
class Validation:
    """Validation of the EMA during a training; every rank calls its methods."""

    run: RunContext
    state: TrainState[DetectionModel]
    loader: ValLoader  # this rank's part of the validation images
    criterion: Criterion[Any]
    saver: Saver  # last.pt of a run stopped here resumes with this validation
    recorder: RunRecorder
    profile: NoProfile
    stop_signals: StopSignals
    watch: TrialObserver | None = None  # observer of a search
    _last: Evaluation | None = None  # of the last epoch

    def before_training(self) -> None:
        """Validate the initial weights if they know all classes: they may stay the best."""
        run = self.run
        if run.pretraining != "known" or run.resumed or run.config.noval or run.config.nosave:
            return
        run.world.set_activity("validating the initial weights")
        self.loader.begin()
        settings = Settings(errors=False)  # until the first step a stop signal acts immediately
        metrics = self._evaluate(self.state.ema.model, settings).metrics
        log.info(f"Before training:\n{table_header()}\n{validation_line(metrics)}")
        self.state.stopper.update(START, metrics.fitness)
        self.saver.before_training(metrics)

    def after_epoch(self, epoch: int) -> Metrics | None:
        """Return the metrics of `epoch`, from 0; None with --noval, except for the last epoch.

        The last epoch also collects errors, as `validate_best` does, which can then reuse it.

        Raises:
            UserError: last.pt could not be written; on every rank.
            Interrupted: a rank received a stop signal; last.pt is written. On every rank.
            Pruned: the search ends this training; on every rank.
        """
        world, is_last = self.run.world, epoch + 1 == self.run.config.epochs
        if self.run.config.noval and not is_last:
            return None
        settings = Settings(stop_requested=self.stop_signals.stop_requested, errors=is_last)
        self.loader.begin()  # forks workers, which must not happen during a write
        self.saver.before_validation()
        world.set_activity(f"validating epoch {epoch}")
        with self.profile.stage("validation"):
            criterion = None if self.run.config.tile else self.criterion
            collectors = self.recorder.image_collectors(self.loader.index, epoch)
            try:
                evaluation = self._evaluate(self.state.ema.model, settings, criterion=criterion, collectors=collectors)
            except EvaluationStopped:
                self.saver.stop_validation()
        self._last = evaluation if is_last else None
        self.state.progress.class_maps = evaluation.metrics.class_maps()
        log.info(f"{table_header()}\n{validation_line(evaluation.metrics)}")
        if self.watch and self.watch.after_epoch(epoch, evaluation):
            self.stop_signals.stop_immediately(
                f"after epoch {epoch}, the last of a training that the search ended early"
            )
            raise Pruned
        return evaluation.metrics

    def validate_best(self, data: TrainingData) -> TrainingResult:
        """Validate the best checkpoint, write its tables, images and report, and log where they are.

        If it has the weights of the last epoch, bit by bit, the last evaluation is reused. For a search, whose runs are
        removed, the last epoch counts.
        """
        self.run.world.set_activity("validating the best epoch")
        if self.watch:
            assert self.watch.metrics, "the last epoch is always validated"
            return self._ended(self.watch.metrics)
        run, best, stopper = self.run, self.saver.best, self.state.stopper
        epoch = self._best_epoch()
        index, model = self.loader.index, self.state.model
        model.load_state_dict(run.world.run_on_main(lambda: load_weights(best).state_dict))
        evaluation = self._last_evaluation_of(model)
        source = f"; validated in the last epoch: {best}" if evaluation else f"; validated again: {best}"
        if evaluation is None:
            evaluation = self._evaluate(model, collectors=self.recorder.image_collectors(index))
        if run.world.is_main:
            none = {None: "No epoch has a finite fitness", START: "No epoch is better than the initial weights"}
            which = "Last" if best.name == "last.pt" else "Best"
            print(f"\n{none.get(epoch, f'{which} epoch {epoch}')}{source}")
            verbose, plots = len(index.names) <= 20, self.recorder.renders
            device, skipped = run.world.accelerator.name, self.state.progress.skipped_steps
            origin = RunInfo(
                run.config,
                str(best),
                run.imgsz,
                device,
                run.world.size,
                data.images,
                self.state.progress.epoch,
                stopper.best_epoch,
                skipped,
                self.criterion.unused,
            )
            epochs = functools.partial(read_results, run.folder / "results.csv")
            report_data = report_validation(
                evaluation, index, data.spec, run.folder, origin, verbose=verbose, plots=plots, epochs=epochs
            )
            tiles = f" --tile {run.config.tile} --overlap {run.config.overlap:g}" if run.config.tile else ""
            print(f"Detect: {started('detect.py')} --weights {shlex.quote(str(best))} --source …{tiles}")
            print(f"Export: {started('export.py')} --weights {shlex.quote(str(best))}")
        self.recorder.finish(max(epoch or 0, 0), stopper.best_epoch, best, evaluation.metrics.confidence)
        if run.world.is_main:
            report_errors(report_data)
        run.world.barrier()
        return self._ended(evaluation.metrics)

    def _last_evaluation_of(self, model: DetectionModel) -> Evaluation | None:
        """Return the last evaluation, without losses, if every rank evaluated the weights of `model`; else None."""
        saved, last = model.state_dict(), self.state.ema.model.state_dict()
        same = self._last is not None and all(torch.equal(saved[name], last[name]) for name in saved)
        if self._last is None or not all(self.run.world.all_gather(same)):
            return None
        return dataclasses.replace(self._last, metrics=dataclasses.replace(self._last.metrics, losses=()))

    def _best_epoch(self) -> int | None:
        """Return the epoch of `saver.best`, which is the last one where there is no best.pt, as with --nosave."""
        last, best = self.state.progress.epoch - 1, self.state.stopper.best_epoch
        return last if best is not None and self.saver.best.name == "last.pt" else best

    def _ended(self, metrics: Metrics) -> TrainingResult:
        data, epochs, best = self.run.config.data, self.state.progress.epoch, self._best_epoch()
        stopped, best = self.state.stopper.has_stopped(epochs), None if best == START else best
        return TrainingResult(metrics, self.run.folder, data, epochs, best, stopped)

    def _evaluate(self, model: DetectionModel, settings: Settings | None = None, **others: Any) -> Evaluation:
        """Evaluate a fused copy of the model, with `--tile` as val.py does; arguments as of `evaluate`."""
        run, accelerator = self.run, self.run.world.accelerator
        work = f"a validation batch of {plural(run.val_batch_size, 'image')} a rank at {run.imgsz} px"
        with explain_out_of_memory(accelerator, work, OUT_OF_MEMORY_REMEDIES):
            evaluated: Network | ImageDetector = network_of(fused_copy(model, accelerator), run.imgsz, accelerator)
            if run.config.tile:
                tiles = run.imgsz, run.config.tile, run.config.overlap
                evaluated = extension("tiles").image_detector(evaluated, *tiles)
            return evaluate(evaluated, self.loader, run.world, settings, **others)
