"""Recorder of a training run: flags, results.csv, images and trackers, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tessera.analysis.error_analysis import ERRORS
from tessera.utils.checkpoints.run_directory import write_flags, write_yaml
from tessera.utils.engine.context import RunContext
from tessera.utils.errors import UserError, warn_on_error
from tessera.utils.evaluation.evaluate import DetectionCollector
from tessera.utils.files import remove_leftovers
from tessera.utils.report.charts.labels import plot_labels
from tessera.utils.report.charts.training import plot_results
from tessera.utils.report.image_grid import render_targets
from tessera.utils.report.results_csv import ResultsTable, read_results, result_columns
from tessera.utils.report.sample_images import SampleImageCollector
from tessera.utils.report.trackers.loggers import Loggers
from tessera.utils.text import duration, first_of, plural
from tessera.utils.types import Batch, DatasetIndex, Metrics

log = logging.getLogger(__name__)

TRAIN_BATCHES = 3  # drawn with their boxes
PREDICTIONS, PREDICTED = 10, 4  # epochs whose predictions are drawn, and images each


@dataclass(frozen=True)
class EpochMetrics:
    """Values of an epoch for results.csv.

    Attributes:
        losses: training losses, means over all ranks.
        metrics: of the validation; None without one.
        rates: learning rates of biases, weights, norm weights.
        seconds, data_wait: of the epoch, and the fraction of training spent waiting for batches.
        images_per_s: trained, over all ranks; 0 if a resumed run only validated the epoch, whose row then has no times.
    """

    losses: Sequence[float]
    metrics: Metrics | None
    rates: Sequence[float]
    seconds: float
    data_wait: float
    images_per_s: float


class RunRecorder(AbstractContextManager["RunRecorder"]):
    """Recorder of a run; a context manager. Ranks other than 0 write nothing.

    A resumed run continues its trackers and keeps its first images; a fresh run removes old event files from its
    directory. Rows of results.csv from `start_epoch` on are removed. `index` is the training split.

    Raises:
        UserError: on every rank, if the run directory is not writable or holds another results.csv.

    Attributes:
        renders: whether this rank draws images.
    """

    def __init__(
        self, run: RunContext, index: DatasetIndex, loss_names: tuple[str, ...], *, start_epoch: int = 0
    ) -> None:
        self.run, self._index, self._world, self._loss_names = run.folder, index, run.world, loss_names
        self._period = max(-(-run.config.epochs // PREDICTIONS), 1)
        self._predictions: SampleImageCollector | None = None
        self._samples: SampleImageCollector | None = None
        self._start_epoch, self._epochs = start_epoch, run.config.epochs
        self.renders = run.world.is_main and not run.config.noplots
        self._rendered = TRAIN_BATCHES if run.resumed or not self.renders else 0
        flags = {**run.config.as_dict(), "optimizer": run.optimizer}
        flags |= {f"hyp_{key}" if key in flags else key: value for key, value in run.hyp.as_dict().items()}
        self._table: ResultsTable | None = None
        # The others wait on the host, not in a collective of the device, and fail with rank 0.
        run.world.run_on_main(lambda: self._open(run, start_epoch))
        trackers = run.config.logger_names if run.world.is_main else ()
        self._loggers = Loggers(trackers, run.folder, flags, resume=run.resumed)
        if self.renders and not run.resumed:
            with self._start_image("labels") as path:
                plot_labels(index, path)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._loggers.close(failed=kind is not None)

    def save_first_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and draw the first few of the run with their boxes."""
        for batch in batches:
            if self._rendered < TRAIN_BATCHES:
                with self._start_image(f"train_batch{self._rendered}") as path:
                    captions = [self._index.path(i).name for i in batch.indices.tolist()]
                    render_targets(batch, self._index.names, captions, path)
                self._rendered += 1
            yield batch

    def image_collectors(self, index: DatasetIndex, epoch: int | None = None) -> list[DetectionCollector]:
        """Return collectors of images of the validation split: a few in up to ten epochs, for `predictions.jpg`.

        `epoch` counts from 0; None = the best epoch, for all images. The last epoch may be the best.
        """
        if not self.renders:
            return []
        predicted = epoch is not None and epoch % self._period == 0
        shown = epoch is None or epoch + 1 == self._epochs
        self._predictions = SampleImageCollector(index, self._world.size, PREDICTED) if predicted else None
        self._samples = SampleImageCollector(index, self._world.size) if shown else None
        return [collector.add for collector in (self._predictions, self._samples) if collector is not None]

    def epoch(self, epoch: int, figures: EpochMetrics) -> None:
        """Add the row of an epoch to results.csv and trackers; log the remaining time after the first.

        Raises:
            UserError: on every rank, if the row cannot be written.
        """
        nan, metrics = float("nan"), figures.metrics
        measured = (metrics.precision, metrics.recall, metrics.map50, metrics.map) if metrics else (nan,) * 4
        val_losses = metrics.losses if metrics and metrics.losses else (nan,) * len(self._loss_names)
        times = figures.seconds, figures.data_wait, figures.images_per_s
        speed = times if figures.images_per_s else (nan,) * len(times)
        cells = (epoch, *figures.losses, *measured, *val_losses, *figures.rates, *speed)
        row = dict(zip(result_columns(self._loss_names), cells, strict=True))

        def append() -> None:
            assert self._table is not None, "rank 0 has a table"
            with self._writing():
                self._table.append(row)

        self._world.run_on_main(append)
        self._loggers.scalars(row, epoch)
        left = self._epochs - epoch - 1
        if epoch == self._start_epoch and left and figures.images_per_s:
            log.info(f"{plural(left, 'more epoch')} at this pace: about {duration(left * figures.seconds)}")
        collector, self._predictions = self._predictions, None
        if collector is not None and len(collector) and metrics is not None:
            with warn_on_error("predictions.jpg"):
                own = self.run / f"predictions_epoch{epoch}.jpg"  # a tracker may read it many epochs later
                for path in (own, self.run / "predictions.jpg"):
                    collector.write_predictions(path, metrics.confidence)
                self._loggers.image("predictions", own, epoch)

    def finish(self, epoch: int, best: int | None, checkpoint: Path, confidence: float) -> None:
        """Plot the curves of the run, and send images and the checkpoint of `epoch` to the trackers.

        `best` is `EarlyStopping.best_epoch`. Sample images show the detections above `confidence`.
        """
        if self._samples is not None:
            self._samples.write(self.run, confidence)
        if self.renders:
            with warn_on_error("results.png"):
                plot_results(read_results(self.run / "results.csv"), self.run / "results.png", best)
            for path in sorted(self.run.glob("*.png")) + sorted(self.run.glob("val_batch*.jpg")):
                self._loggers.image(path.stem, path, epoch)
        if checkpoint.is_file():
            self._loggers.checkpoint(checkpoint)

    def _open(self, run: RunContext, start_epoch: int) -> None:
        with self._writing():
            for folder in (self.run, self.run / "weights"):
                remove_leftovers(folder, of_any_host=True)  # this run may have been killed on another
            # First, as it refuses a foreign results.csv.
            self._table = ResultsTable(self.run / "results.csv", self._loss_names, start_epoch)
            if lost := self._table.lost:
                log.warning(
                    f"{self._table.path}: the rows of {plural(len(lost), 'trained epoch')} are missing "
                    f"({first_of(list(map(str, lost)), 5)}), also from results.png and report.html."
                )
            (self.run / ERRORS).unlink(missing_ok=True)  # of an earlier evaluation
            if not run.resumed:
                for events in self.run.glob("events.out.tfevents.*"):  # of the run that this one replaces
                    events.unlink()
            write_flags(self.run / "opt.yaml", run.config)
            write_yaml(self.run / "hyp.yaml", run.hyp.as_dict())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise errors of the file system as UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Run directory {self.run}: not writable ({error.strerror or error}). Make room or fix its "
                f"permissions, and continue with --resume; or choose another with --project."
            ) from error

    @contextmanager
    def _start_image(self, name: str) -> Iterator[Path]:
        """Yield the path of an image of the run's start, and send the image to the trackers."""
        path = self.run / f"{name}.jpg"
        with warn_on_error(path.name):
            yield path
            self._loggers.image(name, path, 0)
