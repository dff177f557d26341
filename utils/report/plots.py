"""Plots and sample images of a training: labels.jpg, {train,val}_batch*.jpg, predictions*.jpg, results.png."""

from __future__ import annotations

from pathlib import Path

from tessera.utils.engine.state import Training
from tessera.utils.errors import warn_on_error
from tessera.utils.evaluation.predictors import DetectionCollector
from tessera.utils.report.charts import plot_labels, plot_results
from tessera.utils.report.image_grid import SampleImageCollector, render_targets
from tessera.utils.report.observers import EpochResult, Observer, RunResult
from tessera.utils.report.results_csv import read_results
from tessera.utils.types import Batch

TRAIN_BATCHES = 3  # drawn with their boxes
PREDICTIONS, PREDICTED = 10, 4  # epochs whose predictions are drawn, and images each


class Plots(Observer):
    """Plots and sample images of a run; a resumed run keeps those of its start."""

    def begin(self, training: Training) -> None:
        self._training, self._folder = training, training.context.folder
        self._epochs = training.context.config.epochs
        self._period = max(-(-self._epochs // PREDICTIONS), 1)
        self._predictions: SampleImageCollector | None = None
        self._samples: SampleImageCollector | None = None
        self._drawn = TRAIN_BATCHES if training.context.resumed else 0
        if not training.context.resumed:
            with warn_on_error("labels.jpg"):
                plot_labels(training.data.train, self._folder / "labels.jpg")

    def batch(self, batch: Batch) -> None:
        if self._drawn < TRAIN_BATCHES:
            index, path = self._training.data.train, self._folder / f"train_batch{self._drawn}.jpg"
            with warn_on_error(path.name):
                captions = [index.path(i).name for i in batch.indices.tolist()]
                render_targets(batch, index.names, captions, path)
            self._drawn += 1

    def collectors(self, epoch: int | None) -> list[DetectionCollector]:
        """Collect a few images in up to ten epochs, for predictions.jpg, and more in the last or best one."""
        index, ranks = self._training.data.val, self._training.context.world.size
        predicted = epoch is not None and epoch % self._period == 0
        shown = epoch is None or epoch + 1 == self._epochs  # the last epoch may be the best
        self._predictions = SampleImageCollector(index, ranks, PREDICTED) if predicted else None
        self._samples = SampleImageCollector(index, ranks) if shown else None
        return [collector.add for collector in (self._predictions, self._samples) if collector is not None]

    def epoch(self, epoch: EpochResult) -> None:
        collector, self._predictions = self._predictions, None
        if collector is not None and len(collector) and epoch.metrics is not None:
            with warn_on_error("predictions.jpg"):
                # The first keeps its name: a tracker may read it many epochs later.
                for name in (f"predictions_epoch{epoch.number}.jpg", "predictions.jpg"):
                    collector.write_predictions(self._folder / name, epoch.metrics.confidence)

    def end(self, result: RunResult) -> None:
        if self._samples is not None:
            self._samples.write(self._folder, result.evaluation.metrics.confidence)
        with warn_on_error("results.png"):
            results: Path = self._folder / "results.csv"
            best = self._training.state.stopper.best_epoch
            plot_results(read_results(results), results.with_suffix(".png"), best)
