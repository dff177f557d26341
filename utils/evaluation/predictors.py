"""Predictors for validation: a batched network with NMS, or a per-image pipeline; and the evaluation of one rank.

A pipeline is an exported file with NMS inside, or tiled prediction. It reads images at their original size.

On a device with a queue, the next batch is computed while the host runs NMS and matching on this one. The host waits
for one copy per batch, and uses a few threads. All threads start after the loader has forked its workers and end with
the evaluation, so that no fork copies a held lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera.data.source.decode import read_image
from tessera.deploy.runtime.pipeline import Pipeline, network_nms
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion, LossMeter
from tessera.models.nms import NmsSettings, nms_of_candidates, non_max_suppression, select_candidates, undo_letterbox
from tessera.utils.engine.precision import Precision
from tessera.utils.evaluation.backend import Backend, ImageBackend
from tessera.utils.evaluation.matches import Matches
from tessera.utils.evaluation.matching import ImageMatches, match_image
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import single_threaded_pool
from tessera.utils.ranks.world import World
from tessera.utils.thresholds import MAX_DET, Threshold
from tessera.utils.types import Batch, DatasetIndex, Detections

_MOST_THREADS = 4  # more would wait for each other: only NMS runs without the GIL
EvaluatedModel = DetectionModel | Backend | ImageBackend | Pipeline
# Waits for a batch; returns a function per image, whose detections are on the host in pixels of the original image.
PendingDetections = Callable[[], Sequence[Callable[[], Detections]]]
# Takes a batch of this rank with its detections, on the host, in pixels of the original images.
DetectionCollector = Callable[[Batch, Sequence[Detections]], None]


class Stopwatch:
    """Seconds that the device spends in each stage, measured without synchronising."""

    STAGES = ("preprocess", "inference", "nms")

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seconds = dict.fromkeys(self.STAGES, 0.0)
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def begin(self) -> None:
        """Start the first stage of a batch."""
        self._last = self._accelerator.record_event()

    def lap(self, stage: str) -> None:
        """Add the time since the last call to `stage`."""
        before, self._last = self._last, self._accelerator.record_event()
        self._laps.append((stage, before, self._last))

    def add(self, stage: str, seconds: float) -> None:
        """Add host time to `stage`."""
        self._seconds[stage] += seconds

    def seconds(self) -> dict[str, float]:
        """Wait for the device and return the totals."""
        for stage, start, end in self._laps:
            self._seconds[stage] += self._accelerator.elapsed_s(start, end)
        self._laps.clear()
        return dict(self._seconds)


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Attributes:
        conf, iou, max_det: of NMS.
        precision: of a raw model; None = float32.
        errors: count the errors by kind, which needs the boxes of all detections.
        stop_requested: whether this rank was; the ranks vote on it. None = no votes.
        class_of: dataset class of each model class, -1 = none; () = the same. Detections without a class are dropped
            after NMS and `max_det`.
        threshold: confidence of precision, recall and errors; None = that of the best F1.
    """

    conf: float = 0.001
    iou: float = 0.6
    max_det: int = MAX_DET
    precision: Precision | None = None
    errors: bool = True
    stop_requested: Callable[[], bool] | None = None
    class_of: tuple[int, ...] = ()
    threshold: Threshold | None = None


class ShardEvaluation:
    """Evaluation of this rank's images; arguments as of `evaluate`, `index` is the whole split.

    Attributes:
        matches: one part per image.
        clock: time per stage.
        meter: losses; None without a criterion.
    """

    def __init__(
        self,
        model: EvaluatedModel,
        index: DatasetIndex,
        world: World,
        settings: Settings,
        criterion: Criterion[Any] | None,
    ) -> None:
        self.matches: list[Matches] = []
        self.clock = Stopwatch(world.accelerator)
        self.meter = LossMeter(criterion) if criterion is not None else None
        self.settings, self._index, self._accelerator = settings, index, world.accelerator
        self._class_of = torch.tensor(settings.class_of) if settings.class_of else None
        one_class = set(settings.class_of or range(len(index.names))) == {0}  # several classes of a box are duplicates
        limits = settings.conf, settings.iou, settings.max_det
        rules = NmsSettings(*limits, multi_label=not one_class, agnostic=one_class)
        if isinstance(model, ImageBackend):
            model = Pipeline(model, model.imgsz)
        self._predictor = (
            ImagePredictor(model, rules, index)
            if isinstance(model, Pipeline)
            else NetworkPredictor(model, rules, settings.precision, world.accelerator)
        )
        self._finishes_in_thread = self._predictor.concurrent_images > 1
        self._threads = 1 if self._finishes_in_thread else min(_MOST_THREADS, world.cpus)

    @torch.no_grad()
    def add(self, batches: Iterable[Batch], collectors: Sequence[DetectionCollector] = ()) -> None:
        """Evaluate batches whose images are on the device, or on their way to it."""
        waiting: deque[Callable[[], None]] = deque()
        with ThreadPoolExecutor(self._threads, "evaluation") as pool:  # without work it starts no thread
            for batch in batches:
                found = self._predictor.launch(batch, self.clock, self.meter)
                if self._finishes_in_thread:
                    waiting.append(pool.submit(self._finish, batch, found, map, collectors).result)
                else:
                    apply = pool.map if self._accelerator.queue_depth else map
                    waiting.append(partial(self._finish, batch, found, apply, collectors))
                if len(waiting) > max(self._accelerator.queue_depth, int(self._finishes_in_thread)):
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()

    def _finish(
        self,
        batch: Batch,
        found: PendingDetections,
        apply: Callable[..., Any],
        collectors: Sequence[DetectionCollector],
    ) -> None:
        """Match a batch's detections, in the order of its images."""
        images = batch.indices.tolist()
        results = list(apply(self._image, images, found()))
        for image, (_, matches, seconds) in zip(images, results, strict=True):
            self.matches.append(Matches.of_image(image, matches, keep_boxes=self.settings.errors))
            self.clock.add("nms", seconds)
        for collector in collectors:
            collector(batch, [detections for detections, *_ in results])

    def _image(self, image: int, predict: Callable[[], Detections]) -> tuple[Detections, ImageMatches, float]:
        """Return detections and matches of one image, and seconds of NMS on the host.

        It may run in several threads and changes nothing.
        """
        started = time.perf_counter()
        found = predict()
        seconds = time.perf_counter() - started
        if self._class_of is not None:
            own = self._class_of[found.classes]
            found = Detections(found.boxes_xyxy[own >= 0], found.scores[own >= 0], own[own >= 0])
        classes, boxes_xyxy = self._index.labels(image)
        return found, match_image(found, boxes_xyxy, classes, self._index.ignored(image)), seconds


class NetworkPredictor:
    """A network on the device, with NMS by this program.

    `precision` is that of a raw model of a training; opened models have their own.

    Attributes:
        concurrent_images: images computed concurrently, one thread each; 1 = all threads compute one image.
    """

    def __init__(
        self, model: DetectionModel | Backend, rules: NmsSettings, precision: Precision | None, accelerator: Accelerator
    ) -> None:
        self._model, self._accelerator = model, accelerator
        self._precision = precision or Precision(accelerator, torch.float32)
        self._rules = network_nms(rules, model.head if isinstance(model, DetectionModel) else model)
        self.concurrent_images = (
            model.enable_concurrency() if isinstance(model, Backend) and model.splits_batches else 1
        )

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> PendingDetections:
        """Start the computation of a batch; the returned functions may run in several threads and change nothing."""
        clock.begin()
        images = batch.images_on(self._accelerator.device)
        clock.lap("preprocess")
        decoded, raw = self._predict(images)
        clock.lap("inference")
        found = self._select(decoded, clock)
        if meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            assignment = meter.criterion.assign(batch.targets, len(batch), size_hw)
            meter.update(raw, self._accelerator.send(assignment))
        placed = list(zip(batch.placements, batch.sizes_hw.tolist(), strict=True))
        return lambda: [
            partial(_in_original, one, placement, (height, width))
            for one, (placement, (height, width)) in zip(found(), placed, strict=True)
        ]

    def _predict(self, images: Tensor) -> tuple[Tensor, Any]:
        """Return decoded predictions, and the raw outputs of a raw model."""
        if isinstance(self._model, Backend):
            return self._model(images), None
        with self._precision.autocast():
            decoded, raw = self._model(images)
        return decoded, raw

    def _select(self, decoded: Tensor, clock: Stopwatch) -> Callable[[], list[Callable[[], Detections]]]:
        """Run NMS on a batch: with few operations without a device queue, without waiting with one.

        Images that are computed concurrently leave NMS to the thread that finishes the batch.
        """
        if self._accelerator.queue_depth:
            copied = self._accelerator.read_back(select_candidates(decoded, self._rules))
            clock.lap("nms")
            return lambda: [partial(nms_of_candidates, rows, self._rules) for rows in copied()]

        def nms() -> list[Callable[[], Detections]]:
            started = time.perf_counter()
            found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
            self._accelerator.synchronize()
            clock.add("nms", time.perf_counter() - started)
            return [partial(_on_host, detections) for detections in found]

        if self.concurrent_images > 1:
            return nms
        done = nms()
        return lambda: done


class ImagePredictor:
    """A per-image pipeline, with images decoded as for training; interface of NetworkPredictor."""

    def __init__(self, pipeline: Pipeline, rules: NmsSettings, index: DatasetIndex) -> None:
        self._pipeline, self._rules, self._index = pipeline, rules, index
        self.concurrent_images = pipeline.backend.enable_concurrency()

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> PendingDetections:
        """Detect on the images of a batch, as many concurrently as the pipeline allows."""
        assert meter is None, "a pipeline has no losses"
        images = batch.indices.tolist()
        if self.concurrent_images == 1:
            predicted = [self._predict(image) for image in images]
        else:
            with single_threaded_pool(self.concurrent_images, "prediction") as pool:
                predicted = list(pool.map(self._predict, images))
        clock.add("inference", sum(seconds for _, seconds in predicted) / self.concurrent_images)
        return lambda: [lambda one=one: one for one, _ in predicted]  # type: ignore[misc]

    def _predict(self, image: int) -> tuple[Detections, float]:
        """Return the detections of an image, and the seconds of prediction."""
        pixels = read_image(self._index.path(image), rule=self._index.pixels)
        started = time.perf_counter()
        detections = self._pipeline(pixels, self._rules).detections
        return detections, time.perf_counter() - started


def _in_original(found: Callable[[], Detections], placement: Tensor, size_hw: tuple[int, int]) -> Detections:
    return undo_letterbox(found(), placement, size_hw)


def _on_host(detections: Detections) -> Detections:
    return Detections(detections.boxes_xyxy.cpu(), detections.scores.cpu(), detections.classes.cpu())
