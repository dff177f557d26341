"""What one rank measures in one precision: batches become detections, matches, counts and losses.

A device with a queue of its own computes the next batch while the host suppresses and matches this one. The host waits
for one copy a batch, and hands the images to a few threads. Where threads compute a network picture by picture, another
one suppresses and matches. All start after the loader's workers were forked and end with the measurement, so that no
fork copies a lock which they hold.
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

from tessera.models.heads.criterion import Criterion, LossMeter
from tessera.models.suppression import Suppression
from tessera.utils.engine.precision import Precision
from tessera.utils.evaluation.finders import Images, Measurable, NetworkFinder, PictureFinder
from tessera.utils.evaluation.matches import Matches
from tessera.utils.evaluation.matching import ImageMatches, match_image
from tessera.utils.evaluation.sinks import Sink
from tessera.utils.machine.stopwatch import Stopwatch
from tessera.utils.ranks.world import World
from tessera.utils.runtime.model import PictureBackend
from tessera.utils.runtime.pipeline import Pipeline
from tessera.utils.types import Batch, DatasetIndex, Detections

_MOST_THREADS = 4  # beyond it they wait for each other: only suppression runs outside the interpreter's lock


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        conf, iou, max_det: of non-maximum suppression.
        precision: for a raw model to compute in; None = float32.
        errors: keep the boxes of the detections, and count the errors by kind.
        asked_to_stop: whether this rank was; the ranks vote on it meanwhile. None = they do not.
        class_of: class of the dataset for each of the model's, -1 = none, whose detections do not count; () = the same.
            They go after NMS and `max_det`: the others are what they are without it.
    """

    conf: float = 0.001
    iou: float = 0.6
    max_det: int = 300
    precision: Precision | None = None
    errors: bool = True
    asked_to_stop: Callable[[], bool] | None = None
    class_of: tuple[int, ...] = ()


class Measurement:
    """What this rank has found so far; arguments as of `evaluate`, `index` is the whole split.

    Attributes:
        matches: a part for each image so far.
        clock: of these images.
        meter: their losses; None without a criterion.
    """

    def __init__(
        self,
        model: Measurable,
        index: DatasetIndex,
        world: World,
        settings: Settings,
        precision: Precision,
        criterion: Criterion[Any] | None,
    ) -> None:
        self.matches: list[Matches] = []
        self.clock = Stopwatch(world.accelerator)
        self.meter = LossMeter(criterion) if criterion is not None else None
        self.settings, self._index, self._accelerator = settings, index, world.accelerator
        self._class_of = torch.tensor(settings.class_of) if settings.class_of else None
        one_class = set(settings.class_of or range(len(index.names))) == {0}  # then labels of one box are duplicates
        rules = Suppression(
            settings.conf,
            settings.iou,
            settings.max_det,
            multi_label=not one_class,
            agnostic=one_class,
        )
        if isinstance(model, PictureBackend):
            model = Pipeline(model, model.imgsz)
        self._finder = (
            PictureFinder(model, rules, index)
            if isinstance(model, Pipeline)
            else NetworkFinder(model, rules, precision, world.accelerator)
        )
        self._finishes_apart = self._finder.apart > 1
        self._threads = 1 if self._finishes_apart else min(_MOST_THREADS, world.cpus)

    @torch.no_grad()
    def add(self, batches: Iterable[Batch], sinks: Sequence[Sink] = ()) -> None:
        """Measure batches whose images are on the device, or on their way to it."""
        waiting: deque[Callable[[], None]] = deque()
        with ThreadPoolExecutor(self._threads, "evaluation") as pool:  # without work it starts no thread
            for batch in batches:
                found = self._finder.launch(batch, self.clock, self.meter)
                if self._finishes_apart:
                    waiting.append(pool.submit(self._finish, batch, found, map, sinks).result)
                else:
                    apply = pool.map if self._accelerator.queue_depth else map
                    waiting.append(partial(self._finish, batch, found, apply, sinks))
                if len(waiting) > max(self._accelerator.queue_depth, int(self._finishes_apart)):
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()

    def _finish(self, batch: Batch, found: Images, apply: Callable[..., Any], sinks: Sequence[Sink]) -> None:
        """Match a batch's detections, in the order of its images."""
        images = batch.indices.tolist()
        results = list(apply(self._image, images, found()))
        for image, (_, matches, seconds) in zip(images, results, strict=True):
            self.matches.append(Matches.of_image(image, matches, keep_boxes=self.settings.errors))
            self.clock.add("nms", seconds)
        for sink in sinks:
            sink.add(batch, [detections for detections, *_ in results])

    def _image(self, image: int, find: Callable[[], Detections]) -> tuple[Detections, ImageMatches, float]:
        """Detections and matches of one image, and the seconds that its suppression takes on the host.

        It changes nothing, for it may run in several threads.
        """
        started = time.perf_counter()
        found = find()
        seconds = time.perf_counter() - started
        if self._class_of is not None:
            own = self._class_of[found.classes]
            found = Detections(found.boxes_xyxy[own >= 0], found.scores[own >= 0], own[own >= 0])
        classes, boxes_xyxy = self._index.labels(image)
        return found, match_image(found, boxes_xyxy, classes, self._index.ignored(image)), seconds
