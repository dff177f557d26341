"""What one rank measures in one precision: batches become detections, matches, counts and losses.

A device with a queue of its own computes the next batch while the host suppresses and matches this one. The host waits
for one copy a batch, and hands the images to a few threads. They start after the loader's workers were forked and end
with the measurement, so that no fork copies a lock which they hold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.detector import DetectionModel
from models.heads.criterion import Criterion, LossMeter
from models.suppression import (
    Suppression,
    non_max_suppression,
    strongest_candidates,
    suppress_candidates,
    undo_letterbox,
)
from models.tta import predict_augmented
from utils.engine.precision import Precision
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.match_state import Accumulator
from utils.evaluation.matching import ImageMatches, match_image
from utils.evaluation.sinks import Sink
from utils.evaluation.stopwatch import Stopwatch
from utils.ranks.world import World
from utils.types import Batch, DatasetIndex, Detections

_MOST_THREADS = 4  # beyond it they wait for each other: only suppression runs outside the interpreter's lock


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        conf, iou, max_det: of non-maximum suppression.
        precision: to compute in; None = float32.
        try_half: use half precision where it is faster on the device and the first images show the same mAP and the
            same losses in it; instead of `precision`.
        augment: test-time augmentation (no losses then).
        asked_to_stop: whether this rank was; the ranks vote on it meanwhile. None = they do not.
    """

    conf: float = 0.001
    iou: float = 0.6
    max_det: int = 300
    precision: Precision | None = None
    try_half: bool = False
    augment: bool = False
    asked_to_stop: Callable[[], bool] | None = None


class ImageResult(NamedTuple):
    """What was found on one image, in pixels of the batch and of the original, and what it adds to the metric."""

    in_batch: Detections
    in_original: Detections
    matches: ImageMatches
    seconds: float  # of suppression on the host


class Measurement:
    """What this rank has found so far.

    Args:
        model: the raw model, in evaluation mode, on the device.
        index: the whole split, whose labels count.
        world: this rank.
        settings: how to measure.
        precision: to compute in.
        criterion: for the validation losses; None = no losses.

    Attributes:
        matches, confusion, clock: of the images so far.
        meter: their losses; None without a criterion.
    """

    def __init__(
        self,
        model: DetectionModel,
        index: DatasetIndex,
        world: World,
        settings: Settings,
        precision: Precision,
        criterion: Criterion[Any] | None,
    ) -> None:
        self.matches, self.confusion = Accumulator(), ConfusionMatrix(len(index.names))
        self.clock = Stopwatch(world.accelerator)
        self.meter = LossMeter(criterion) if criterion is not None and not settings.augment else None
        self._model, self._index, self._settings, self._precision = model, index, settings, precision
        self._accelerator = world.accelerator
        self._threads = min(_MOST_THREADS, world.cpus)
        self._one_class = len(index.names) == 1  # then labels of one box are duplicates
        self._rules = Suppression(
            settings.conf,
            settings.iou if model.head.needs_suppression else 1.0,
            settings.max_det,
            multi_label=not self._one_class,
            agnostic=self._one_class,
            has_objectness=model.head.has_objectness,
        )

    @torch.no_grad()
    def add(self, batches: Iterable[Batch], sinks: Sequence[Sink] = ()) -> None:
        """Measure batches whose images are on the device, or on their way to it."""
        waiting: deque[tuple[Batch, Callable[[], list[Callable[[], Detections]]]]] = deque()
        with ThreadPoolExecutor(self._threads, "evaluation") as pool:  # without work it starts no thread
            for batch in batches:
                waiting.append((batch, self._launch(batch)))
                if len(waiting) > self._accelerator.queue_depth:
                    self._finish(*waiting.popleft(), pool, sinks)
            while waiting:
                self._finish(*waiting.popleft(), pool, sinks)

    def _launch(self, batch: Batch) -> Callable[[], list[Callable[[], Detections]]]:
        """Let the device compute a batch; return what waits for it and gives a function for each image's detections."""
        self.clock.begin()
        images = batch.images_on(self._accelerator.device)
        self.clock.lap("preparation")
        with self._precision.autocast():
            decoded, raw = (
                (predict_augmented(self._model, images), []) if self._settings.augment else self._model(images)
            )
        self.clock.lap("inference")
        found = self._select(decoded)
        if self.meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            assignment = self.meter.criterion.assign(batch.targets, len(batch), size_hw)
            self.meter.update(raw, self._accelerator.send(assignment))
        return found

    def _select(self, decoded: Tensor) -> Callable[[], list[Callable[[], Detections]]]:
        """Detections of a batch. Without a queue on the device, the fewest operations; with one, no waiting."""
        if self._accelerator.queue_depth:
            copied = self._accelerator.read_back(strongest_candidates(decoded, self._rules))
            self.clock.lap("nms")
            return lambda: [partial(suppress_candidates, rows, self._rules) for rows in copied()]
        found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
        self.clock.lap("nms")
        return lambda: [partial(_on_host, detections) for detections in found]

    def _finish(
        self,
        batch: Batch,
        found: Callable[[], list[Callable[[], Detections]]],
        pool: ThreadPoolExecutor,
        sinks: Sequence[Sink],
    ) -> None:
        """Match a batch's detections, in the order of its images."""
        images, sizes_hw = batch.indices.tolist(), batch.sizes_hw.tolist()
        apply = pool.map if self._accelerator.queue_depth else map
        results = list(apply(self._image, images, found(), batch.placements, sizes_hw))
        for image, result in zip(images, results, strict=True):
            classes, boxes_xyxy = self._index.labels(image)
            self.matches.add(image, result.matches)
            self.confusion.add(result.in_original, boxes_xyxy, classes, self._index.crowds(image))
            self.clock.add("nms", result.seconds)
        for sink in sinks:
            sink.add(batch, [result.in_batch for result in results], [result.in_original for result in results])

    def _image(
        self, image: int, found: Callable[[], Detections], placement: Tensor, size_hw: tuple[int, int]
    ) -> ImageResult:
        """Detections and matches of one image; changes nothing, for it may run in several threads."""
        started = time.perf_counter()
        in_batch = found()
        seconds = time.perf_counter() - started
        if self._one_class:
            in_batch = Detections(in_batch.boxes_xyxy, in_batch.scores, torch.zeros_like(in_batch.classes))
        in_original = undo_letterbox(in_batch, placement, (size_hw[0], size_hw[1]))
        classes, boxes_xyxy = self._index.labels(image)
        matches = match_image(in_original, boxes_xyxy, classes, self._index.crowds(image))
        return ImageResult(in_batch, in_original, matches, seconds)


def _on_host(detections: Detections) -> Detections:
    return Detections(detections.boxes_xyxy.cpu(), detections.scores.cpu(), detections.classes.cpu())
