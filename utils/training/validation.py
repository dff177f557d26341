"""The validations of a training: after an epoch's steps, and of the best checkpoint at the end."""

from __future__ import annotations

import dataclasses
import functools
import logging
import shlex
from dataclasses import dataclass
from typing import Any

import torch

from tessera.data.feed.loader import ValLoader
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.profile import NoProfile
from tessera.utils.engine.state import TrainState
from tessera.utils.engine.stopping import START
from tessera.utils.evaluation.evaluate import Abandoned, Evaluation, evaluate
from tessera.utils.evaluation.predictors import Settings
from tessera.utils.flags.program import started
from tessera.utils.ranks.signals import Interruption
from tessera.utils.report.page.page_data import Origin
from tessera.utils.report.results import read_results
from tessera.utils.report.run_recorder import Journal
from tessera.utils.report.validation import report_errors, report_validation, table_header, validation_line
from tessera.utils.runtime.checkpoint import TrainedNetwork, fused_copy
from tessera.utils.runtime.pipeline import Pipeline
from tessera.utils.search.trial import Pruned, Watch
from tessera.utils.training.data import TrainingData
from tessera.utils.training.result import Ended
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)


@dataclass
class Validation:
    """Measures the averaged model after an epoch's steps, while last.pt is written; every rank calls its methods."""

    run: RunContext
    state: TrainState[DetectionModel]  # whose average is measured
    loader: ValLoader  # this rank's share of the validation images
    criterion: Criterion[Any]
    saver: Saver  # writes last.pt, from which a run that is stopped here resumes with this validation
    journal: Journal
    profile: NoProfile
    interruption: Interruption
    watch: Watch | None = None  # what a search sees of the training
    _last: Evaluation | None = None  # of the last epoch

    @property
    def _settings(self) -> Settings:
        return Settings(asked_to_stop=self.interruption.asked, errors=False)

    def before_training(self) -> None:
        """Measure what a fresh run begins with where its weights know all of the classes: a candidate for the best."""
        run = self.run
        if run.start != "known" or run.resumed or run.config.noval or run.config.nosave:
            return
        run.world.set_activity("measuring the weights that the run begins with")
        self.loader.begin()
        settings = dataclasses.replace(self._settings, asked_to_stop=None)  # a signal acts at once until the first step
        metrics = evaluate(self._measurable(self.state.ema.model), self.loader, run.world, settings).metrics
        log.info(f"Before training:\n{table_header()}\n{validation_line(metrics)}")
        self.state.stopper.update(START, metrics.fitness)
        self.saver.before_training(metrics)

    def after_epoch(self, epoch: int) -> Metrics | None:
        """Metrics of `epoch`, from 0; None under --noval, but for the last epoch.

        The last epoch is measured as `of_best` does, which need not do it again where that one is the best.

        Raises:
            UserError: on every rank, where last.pt could not be written.
            Interrupted: on every rank, where one was asked to stop; last.pt is written then.
            Pruned: on every rank, where the search has seen enough.
        """
        world, is_last = self.run.world, epoch + 1 == self.run.config.epochs
        if self.run.config.noval and not is_last:
            return None
        settings = dataclasses.replace(self._settings, errors=True) if is_last else self._settings
        self.loader.begin()  # before a file is written: no process may be forked then
        self.saver.before_validation()
        world.set_activity(f"validating epoch {epoch}")
        with self.profile.stage("validation"):
            averaged = self._measurable(self.state.ema.model)
            criterion = None if self.run.config.tile else self.criterion
            sinks = self.journal.picture_sinks(self.loader.index, epoch)
            try:
                found = evaluate(averaged, self.loader, world, settings, criterion=criterion, sinks=sinks)
            except Abandoned:
                self.saver.stop_validation()
        self._last = found if is_last else None
        self.state.progress.class_maps = found.metrics.class_maps()
        log.info(f"{table_header()}\n{validation_line(found.metrics)}")
        if self.watch and self.watch.after_epoch(epoch, found):
            self.interruption.act_at_once(f"after epoch {epoch}, the last of a training that the search ended early")
            raise Pruned
        return found.metrics

    def of_best(self, data: TrainingData) -> Ended:
        """Measure the best checkpoint, with its tables, pictures and page, and say where everything lies.

        Not once more where it holds the weights of the last epoch, bit by bit; and not for a search, of whose trainings
        nothing stays: there the last epoch counts.
        """
        self.run.world.set_activity("measuring the best epoch")
        if self.watch:
            assert self.watch.metrics, "the last epoch is always measured"
            return self._ended(self.watch.metrics)
        run, best, epoch = self.run, self.saver.best, self.state.stopper.best_epoch
        index, model = self.loader.index, self.state.model
        model.load_state_dict(run.world.from_main(lambda: load_weights(best).state_dict))
        found = self._measured_last(model)
        said = f"; the last epoch has measured {best}" if found else f"; measured again from {best}"
        if found is None:
            sinks = self.journal.picture_sinks(index)
            found = evaluate(self._measurable(model), self.loader, run.world, sinks=sinks)
        if run.world.is_main:
            none = {None: "No epoch has a finite fitness", START: "No epoch is better than what the run began with"}
            print(f"\n{none.get(epoch, f'Best epoch {epoch}')}{said}")
            verbose, plots = len(index.names) <= 20, self.journal.renders
            device, skipped = run.world.accelerator.name, self.state.progress.skipped_steps
            origin = Origin(run.config, str(best), run.imgsz, device, run.world.size, data.pictures, epoch, skipped)
            epochs = functools.partial(read_results, run.folder / "results.csv")
            listed = report_validation(
                found, index, data.spec, run.folder, origin, verbose=verbose, plots=plots, epochs=epochs
            )
            tiles = f" --tile {run.config.tile} --overlap {run.config.overlap:g}" if run.config.tile else ""
            print(f"Detect: {started('detect.py')} --weights {shlex.quote(str(best))} --source …{tiles}")
            print(f"Export: {started('export.py')} --weights {shlex.quote(str(best))}")
        self.journal.finish(max(epoch or 0, 0), best, found.metrics.confidence)
        if run.world.is_main:
            report_errors(listed)
        run.world.barrier()
        return self._ended(found.metrics)

    def _measured_last(self, model: DetectionModel) -> Evaluation | None:
        """What the last epoch measured, where every rank has the same weights as `model`; without losses."""
        saved, last = model.state_dict(), self.state.ema.model.state_dict()
        same = self._last is not None and all(torch.equal(saved[name], last[name]) for name in saved)
        if self._last is None or not all(self.run.world.all_gather(same)):
            return None
        return dataclasses.replace(self._last, metrics=dataclasses.replace(self._last.metrics, losses=()))

    def _ended(self, metrics: Metrics) -> Ended:
        config, epochs, stopper = self.run.config, self.state.progress.epoch, self.state.stopper
        best = None if stopper.best_epoch == START else stopper.best_epoch
        return Ended(metrics, self.run.folder, config.data, epochs, best, stopper.has_stopped(epochs))

    def _measurable(self, model: DetectionModel) -> DetectionModel | Pipeline:
        """What finds the objects: a copy of the model, with `--tile` in the pipeline of val.py."""
        run, accelerator = self.run, self.run.world.accelerator
        fused = fused_copy(model, accelerator)
        if not run.config.tile:
            return fused
        return Pipeline(TrainedNetwork(fused, run.imgsz, accelerator), run.imgsz, run.config.tile, run.config.overlap)
