"""Plots and sample images of a training: labels.jpg, {train,val}_batch*.jpg, predictions*.jpg, results.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.analysis.charts import plot_labels, plot_results, read_results
from tessera.deploy.inference.drawing import MAX_IMAGES, MAX_SIDE, Annotations, save_grid
from tessera.utils.bit_depth import Pixels
from tessera.utils.engine.state import Training
from tessera.utils.errors import warn_on_error
from tessera.utils.evaluation.evaluate import DetectionCollector
from tessera.utils.machine.opencv import cv2
from tessera.utils.report.observers import EpochResult, Observer, RunResult
from tessera.utils.types import Batch, DatasetIndex, Detections

SHOWN = 3 * MAX_IMAGES  # sample images of a validation
_SAMPLE_SIDE = MAX_SIDE // 4  # pixels of an image in a full grid
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


def render_targets(batch: Batch, names: Sequence[str], captions: Sequence[str], target: Path) -> None:
    """Write the first 16 images of a training batch with their targets as a JPEG."""
    images = list(batch.images[:MAX_IMAGES].cpu().numpy())
    save_grid(images, [annotations_of(batch, image) for image in range(len(images))], names, captions, target)


def annotations_of(batch: Batch, image: int) -> Annotations:
    """Return the objects and ignored regions of one image of a batch."""
    shown = (batch.targets[:, 0] == image) & (batch.targets[:, 1] >= -1)
    rows = batch.targets[shown].cpu().numpy()
    return Annotations(rows[:, 2:6], rows[:, 1].astype(np.int64))


class _Taken(NamedTuple):
    """An image without padding, its labels and predictions."""

    image: Pixels
    labelled: Annotations
    found: Annotations
    caption: str


class SampleImageCollector:
    """Collector of `images` images of a split, spread evenly over this rank's part, so that all shapes occur."""

    def __init__(self, index: DatasetIndex, ranks: int, images: int = SHOWN) -> None:
        self._index, self._most = index, images
        self._every = max(len(index) // (ranks * images), 1)
        self._seen = 0
        self._taken: list[_Taken] = []

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Collect the sampled images of a batch."""
        with warn_on_error("sample images of the validation"):
            for image in range(len(batch)):
                if self._seen % self._every == 0 and len(self._taken) < self._most:
                    self._taken.append(self._take(batch, image, found[image]))
                self._seen += 1

    def write(self, folder: Path, confidence: float) -> None:
        """Write `val_batch{0,1,2}_{labels,pred}.jpg`, 16 images each, with detections above a confidence."""
        grids = -(-len(self._taken) // MAX_IMAGES)
        for number in range(grids):
            taken = self._taken[number::grids]
            images, labels, _, captions = zip(*taken, strict=True)
            with warn_on_error(f"val_batch{number} images"):
                save_grid(images, labels, self._index.names, captions, folder / f"val_batch{number}_labels.jpg")
                self.write_predictions(folder / f"val_batch{number}_pred.jpg", confidence, taken)

    def write_predictions(self, target: Path, confidence: float, taken: Sequence[_Taken] = ()) -> None:
        """Write the predictions on some images, by default on the first 16."""
        taken = taken or self._taken
        found = [image.found.above(confidence) for image in taken]
        captions = [f"{image.caption} ≥ {confidence:.3f}" for image in taken]
        save_grid([image.image for image in taken], found, self._index.names, captions, target)

    def _take(self, batch: Batch, image: int, detections: Detections) -> _Taken:
        scale_x, scale_y, left, top = batch.placements[image].tolist()
        height, width = batch.sizes_hw[image].tolist()
        x1, y1, x2, y2 = (round(v) for v in (left, top, left + scale_x * width, top + scale_y * height))
        pixels = batch.images[image, y1:y2, x1:x2].cpu().numpy()
        shrunk = min(_SAMPLE_SIDE / max(pixels.shape), 1.0)
        if shrunk < 1:
            pixels = cv2.resize(pixels, None, fx=shrunk, fy=shrunk, interpolation=cv2.INTER_AREA)

        labels = annotations_of(batch, image)
        scores = detections.scores.float().cpu().numpy()
        scale = np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        boxes = detections.boxes_xyxy.float().cpu().numpy() * scale + np.array([left, top, left, top], np.float32)
        classes = detections.classes.cpu().numpy().astype(np.int64)
        corner = np.array([x1, y1, x1, y1], np.float32)
        return _Taken(
            pixels,
            labels._replace(boxes_xyxy=(labels.boxes_xyxy - corner) * shrunk),
            Annotations((boxes - corner) * shrunk, classes, scores),
            self._index.path(int(batch.indices[image])).name,
        )
