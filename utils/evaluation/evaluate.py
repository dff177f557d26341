"""Distributed evaluation of a model on a split: each rank predicts and matches its images, rank 0 gathers the results.

On a device with a queue, the next batch is computed while the host runs NMS and matching on this one. The host waits
for one copy per batch, and uses a few threads. All threads start after the loader has forked its workers and end with
the evaluation, so that no fork copies a held lock.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import ValLoader, build_val_loader
from tessera.data.source.decode import read_image
from tessera.models.heads.criterion import Criterion, LossMeter
from tessera.models.nms import NmsSettings, nms_of_candidates, non_max_suppression, select_candidates, undo_letterbox
from tessera.utils.evaluation.average_precision import Ranking, ranking_of
from tessera.utils.evaluation.curves import Curves, summarize
from tessera.utils.evaluation.matching import Matches, match_image
from tessera.utils.evaluation.network import ImageDetector, Network, network_nms, single_threaded_pool
from tessera.utils.image_size import ImageSize
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.thresholds import MAX_DET, Threshold
from tessera.utils.types import Batch, DatasetIndex, Detections, Metrics

VOTE_S = 5.0  # seconds between two votes on stopping
_MOST_THREADS = 4  # more would wait for each other: only NMS runs without the GIL
# Waits for a batch; returns a function per image, whose detections are on the host in pixels of the original image.
# The functions may run in several threads and change nothing.
PendingDetections = Callable[[], Sequence[Callable[[], Detections]]]
# Takes a batch of this rank with its detections, on the host, in pixels of the original images.
DetectionCollector = Callable[[Batch, Sequence[Detections]], None]


class EvaluationStopped(Exception):
    """A stop was requested on a rank, and all ranks have ended the validation."""


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Attributes:
        conf, iou, max_det: of NMS.
        boxes: return the boxes of all detections in the matches.
        stop_requested: whether this rank was; the ranks vote on it. None = no votes.
        class_of: dataset class of each model class, -1 = none; () = the same. Detections without a class are dropped
            after NMS and `max_det`.
        threshold: confidence of precision, recall and errors; None = that of the best F1.
    """

    conf: float = 0.001
    iou: float = 0.6
    max_det: int = MAX_DET
    boxes: bool = True
    stop_requested: Callable[[], bool] | None = None
    class_of: tuple[int, ...] = ()
    threshold: Threshold | None = None


@dataclass(frozen=True)
class Evaluation:
    """Result of a validation. All but the metrics is on rank 0 alone, and empty on the others.

    `metrics.confidence` has the best F1, unless it has another `origin`.
    """

    metrics: Metrics
    curves: Curves
    ranking: Ranking
    matches: Matches
    origin: str = ""
    max_det: int = MAX_DET


def evaluate_split(
    model: Network | ImageDetector,
    index: DatasetIndex,
    world: World,
    imgsz: ImageSize,
    settings: Settings,
    *,
    batch_size: int,
    workers: int,
    collectors: Sequence[DetectionCollector] = (),
) -> Evaluation:
    """Evaluate an opened model on a split.

    `imgsz` is the size of the images; `batch_size` and `workers` are those of a rank.
    """
    with (
        open_images(index, imgsz, "none", "area", world) as store,
        build_val_loader(
            store, world, batch_size=batch_size, stride=model.stride, workers=workers, size_hw=model.size_hw
        ) as loader,
    ):
        return evaluate(model, loader, world, settings, collectors=collectors)


def evaluate(
    model: Network | ImageDetector,
    loader: ValLoader,
    world: World,
    settings: Settings | None = None,
    *,
    criterion: Criterion[Any] | None = None,
    collectors: Sequence[DetectionCollector] = (),
) -> Evaluation:
    """Evaluate `model` on this rank's images, and gather the results of all ranks.

    `criterion` gives the validation losses of the network of a training; None = no losses.

    Raises:
        EvaluationStopped: on every rank, where a stop was requested on one.
    """
    settings = settings or Settings()
    accelerator = world.accelerator
    found = ShardEvaluation(model, loader.index, world, settings, criterion)
    with accelerator.without_kernel_benchmark():
        found.add(_voting(accelerator.prefetch(loader), settings.stop_requested, world), collectors)
    return _joined(found, loader.index, world)


def _voting(batches: Iterator[Batch], stop_requested: Callable[[], bool] | None, world: World) -> Iterator[Batch]:
    """Yield the batches; after the first, and then about every `VOTE_S`, the ranks vote on stopping.

    A rank that has no batch left keeps voting until all are done. Each vote sets the number of batches until the next
    one, by the pace of the slowest rank. If a stop was requested on one, every rank raises EvaluationStopped.
    """
    if stop_requested is None:
        yield from batches
        return
    count, busy = 1, True
    while busy:
        started, taken = time.monotonic(), 0
        for batch in itertools.islice(batches, count):
            yield batch
            taken += 1
        pace = (time.monotonic() - started) / max(taken, 1)  # seconds a batch
        stops, taken_by_rank, paces = zip(*world.all_gather((stop_requested(), taken, pace)), strict=True)
        if any(stops):
            raise EvaluationStopped
        busy = max(taken_by_rank) == count
        count = max(1, int(VOTE_S / max(max(paces), 1e-9)))


def _joined(found: ShardEvaluation, index: DatasetIndex, world: World) -> Evaluation:
    """Gather the results of all ranks on rank 0, and broadcast the metrics."""
    totals = None if found.meter is None else found.meter.total()
    shares = world.gather((Matches.joined(found.matches), totals, found.clock.seconds()))
    matches = Matches.joined([of_rank for of_rank, _, _ in shares])
    ranking = ranking_of(matches)
    settings = found.settings
    threshold, origin = settings.threshold or (None, "")
    metrics, curves = summarize(ranking, len(index.names), threshold, settings.conf)
    images_seen = max(metrics.images, 1)
    preprocessing, inference, nms = (
        1000 * sum(seconds[stage] for _, _, seconds in shares) / images_seen for stage in Stopwatch.STAGES
    )
    losses = found.meter.losses(of_rank for _, of_rank, _ in shares) if found.meter is not None else ()
    speed_ms = preprocessing, inference, nms
    metrics = world.broadcast(dataclasses.replace(metrics, losses=losses, speed_ms=speed_ms, names=tuple(index.names)))
    return Evaluation(metrics, curves, ranking, matches, origin, settings.max_det)


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


class ShardEvaluation:
    """Evaluation of this rank's images; arguments as of `evaluate`, `index` is the whole split.

    A network takes batches of the loader; an image detector reads each image of a batch itself, at its original size.

    Attributes:
        matches: one part per image.
        clock: time per stage.
        meter: losses; None without a criterion.
    """

    def __init__(
        self,
        model: Network | ImageDetector,
        index: DatasetIndex,
        world: World,
        settings: Settings,
        criterion: Criterion[Any] | None,
    ) -> None:
        self.matches: list[Matches] = []
        self.clock = Stopwatch(world.accelerator)
        self.meter = LossMeter(criterion) if criterion is not None else None
        self.settings, self._model, self._index, self._accelerator = settings, model, index, world.accelerator
        self._class_of = torch.tensor(settings.class_of) if settings.class_of else None
        one_class = set(settings.class_of or range(len(index.names))) == {0}  # several classes of a box are duplicates
        limits = settings.conf, settings.iou, settings.max_det
        self._rules = network_nms(NmsSettings(*limits, multi_label=not one_class, agnostic=one_class), model)
        # Images computed concurrently, one thread each; 1 = all threads compute one image.
        self._concurrent = 1
        if isinstance(model, ImageDetector) or model.splits_batches:
            self._concurrent = model.enable_concurrency()
        self._threads = 1 if self._concurrent > 1 else min(_MOST_THREADS, world.cpus)

    @torch.no_grad()
    def add(self, batches: Iterable[Batch], collectors: Sequence[DetectionCollector] = ()) -> None:
        """Evaluate batches whose images are on the device, or on their way to it."""
        waiting: deque[Callable[[], None]] = deque()
        with ThreadPoolExecutor(self._threads, "evaluation") as pool:  # without work it starts no thread
            for batch in batches:
                found = self._launch(self._model, batch)
                if self._concurrent > 1:
                    waiting.append(pool.submit(self._finish, batch, found, map, collectors).result)
                else:
                    apply = pool.map if self._accelerator.queue_depth else map
                    waiting.append(partial(self._finish, batch, found, apply, collectors))
                if len(waiting) > max(self._accelerator.queue_depth, int(self._concurrent > 1)):
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
        for _, matches, seconds in results:
            without = matches._replace(boxes_xyxy=np.zeros((len(matches.scores), 0), np.float32))
            self.matches.append(matches if self.settings.boxes else without)
            self.clock.add("nms", seconds)
        for collector in collectors:
            collector(batch, [detections for detections, *_ in results])

    def _image(self, image: int, predict: Callable[[], Detections]) -> tuple[Detections, Matches, float]:
        """Return detections and matches of one image, and seconds of NMS on the host.

        It may run in several threads and changes nothing.
        """
        started = time.perf_counter()
        found = predict()
        seconds = time.perf_counter() - started
        if self._class_of is not None:
            own = self._class_of[found.classes]
            found = dataclasses.replace(found, classes=own).select(own >= 0)
        classes, boxes_xyxy = self._index.labels(image)
        regions, unlabelled = self._index.ignored(image), self._index.unlabelled(image)
        return found, match_image(found, boxes_xyxy, classes, regions, unlabelled, image=image), seconds

    def _launch(self, model: Network | ImageDetector, batch: Batch) -> PendingDetections:
        """Start the computation of a batch."""
        if isinstance(model, ImageDetector):
            return self._detect_images(model, batch)
        self.clock.begin()
        images = batch.images_on(self._accelerator.device)
        self.clock.lap("preprocess")
        decoded, raw = model.predict(images)
        self.clock.lap("inference")
        found = self._select(decoded)
        if self.meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            assignment = self.meter.criterion.assign(batch.targets, len(batch), size_hw, batch.unlabelled)
            self.meter.update(raw, self._accelerator.send(assignment))
        placed = list(zip(batch.placements, batch.sizes_hw.tolist(), strict=True))
        return lambda: [
            partial(_in_original, one, placement, (height, width))
            for one, (placement, (height, width)) in zip(found(), placed, strict=True)
        ]

    def _select(self, decoded: Tensor) -> Callable[[], list[Callable[[], Detections]]]:
        """Run NMS on a batch: with few operations without a device queue, without waiting with one.

        Images that are computed concurrently leave NMS to the thread that finishes the batch.
        """
        if self._accelerator.queue_depth:
            copied = self._accelerator.read_back(select_candidates(decoded, self._rules))
            self.clock.lap("nms")
            return lambda: [partial(nms_of_candidates, rows, self._rules) for rows in copied()]

        def nms() -> list[Callable[[], Detections]]:
            started = time.perf_counter()
            found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
            self._accelerator.synchronize()
            self.clock.add("nms", time.perf_counter() - started)
            return [detections.cpu for detections in found]

        if self._concurrent > 1:
            return nms
        done = nms()
        return lambda: done

    def _detect_images(self, model: ImageDetector, batch: Batch) -> PendingDetections:
        """Detect on the images of a batch, as many concurrently as the model allows."""
        assert self.meter is None, "an image detector has no losses"

        def detect(image: int) -> tuple[Detections, float]:
            pixels = read_image(self._index.path(image), rule=self._index.pixels)
            started = time.perf_counter()
            return model(pixels, self._rules).detections, time.perf_counter() - started

        images = batch.indices.tolist()
        if self._concurrent == 1:
            predicted = [detect(image) for image in images]
        else:
            with single_threaded_pool(self._concurrent, "prediction") as pool:
                predicted = list(pool.map(detect, images))
        self.clock.add("inference", sum(seconds for _, seconds in predicted) / self._concurrent)
        return lambda: [lambda one=one: one for one, _ in predicted]  # type: ignore[misc]


def _in_original(found: Callable[[], Detections], placement: Tensor, size_hw: tuple[int, int]) -> Detections:
    return undo_letterbox(found(), placement, size_hw)
