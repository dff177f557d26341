"""The observers of a training, by its flags."""

from __future__ import annotations

import logging

from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.extensions import extension
from tessera.utils.ranks.world import World
from tessera.utils.report.console import print_lines, table_header, validation_line
from tessera.utils.report.observers import Observer, RunResult, own_observers
from tessera.utils.report.plots import Plots
from tessera.utils.report.results_csv import RunFiles
from tessera.utils.report.trackers import Trackers, import_tracker
from tessera.utils.training.divergence import DivergenceGuard

log = logging.getLogger(__name__)


class MetricsTable(Observer):
    """The metrics of the best epoch, where there is no report."""

    def end(self, result: RunResult) -> None:
        print_lines(table_header(), validation_line(result.evaluation.metrics))


def observers_of(flags: TrainConfig, world: World, trial: Observer | None) -> list[Observer]:
    """Return the observers of a training in order: `trial` is that of a search, in place of the report.

    Raises:
        ConfigError: a tracker or a part of the user's own cannot be used; on every rank.
    """
    world.run_on_main(lambda: all(map(import_tracker, flags.logger_names)))  # modules cannot be sent
    report = [trial or _report()] if world.is_main or trial else []
    plots = [] if flags.noplots else [Plots()]
    # The report first: trackers take its charts, and it closes last, which marks the run as evaluated.
    return [*report, DivergenceGuard(), RunFiles(), *plots, Trackers(), *own_observers(flags.callbacks)]


def _report() -> Observer:
    try:
        made: Observer = extension("validation report").TrainingReport()
    except UserError as error:
        log.warning(f"{error} The run ends without error analysis and report.html.")
        return MetricsTable()
    return made
