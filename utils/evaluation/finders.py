"""How a validation finds objects: by a network whose rows are suppressed here, or by a pipeline, picture by picture.

A network sees the images of a batch, letterboxed by the loader. A pipeline (a file that has all of it inside, or
tiles) sees each picture as it was decoded, and answers in its pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tessera.data.source.decode import read_image
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossMeter
from tessera.models.suppression import (
    Suppression,
    non_max_suppression,
    strongest_candidates,
    suppress_candidates,
    undo_letterbox,
)
from tessera.utils.engine.precision import Precision
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import threads_apart
from tessera.utils.machine.stopwatch import Stopwatch
from tessera.utils.runtime.model import Backend, PictureBackend
from tessera.utils.runtime.pipeline import Pipeline, rules_of_network
from tessera.utils.types import Batch, DatasetIndex, Detections

Measurable = DetectionModel | Backend | PictureBackend | Pipeline


# Waits for a batch; then a function for each image, whose detections are on the host in its own pixels.
Images = Callable[[], Sequence[Callable[[], Detections]]]


class NetworkFinder:
    """A network on the device, with the suppression of this program.

    Args:
        model: the raw model of a training, in evaluation mode, on the device; or what `--weights` names, opened.
        rules: which predictions count; what follows from the network is added here.
        precision: for a raw model; the others have one of their own.

    Attributes:
        apart: pictures that it computes at once, a thread each; 1 = all threads compute one.
    """

    def __init__(
        self, model: DetectionModel | Backend, rules: Suppression, precision: Precision, accelerator: Accelerator
    ) -> None:
        self._model, self._precision, self._accelerator = model, precision, accelerator
        self._rules = rules_of_network(rules, model.head if isinstance(model, DetectionModel) else model)
        self.apart = model.compute_apart() if isinstance(model, Backend) and model.divides_batches else 1

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> Images:
        """Let the device compute a batch; the functions change nothing, for they may run in several threads."""
        clock.begin()
        images = batch.images_on(self._accelerator.device)
        clock.lap("preparation")
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
        """The rows, and of a raw model what its losses are made of."""
        if isinstance(self._model, Backend):
            return self._model(images), None
        with self._precision.autocast():
            decoded, raw = self._model(images)
        return decoded, raw

    def _select(self, decoded: Tensor, clock: Stopwatch) -> Callable[[], list[Callable[[], Detections]]]:
        """Detections of a batch. Without a queue on the device, the fewest operations; with one, no waiting.

        Of pictures that are computed apart all is left for the thread that finishes the batch.
        """
        if self._accelerator.queue_depth:
            copied = self._accelerator.read_back(strongest_candidates(decoded, self._rules))
            clock.lap("nms")
            return lambda: [partial(suppress_candidates, rows, self._rules) for rows in copied()]
        if self.apart > 1:
            return lambda: self._suppressed(decoded, clock)
        found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
        clock.lap("nms")
        return lambda: [partial(_on_host, detections) for detections in found]

    def _suppressed(self, decoded: Tensor, clock: Stopwatch) -> list[Callable[[], Detections]]:
        """The same on the host, in the thread that asks for it."""
        started = time.perf_counter()
        found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
        clock.add("nms", time.perf_counter() - started)
        return [partial(_on_host, detections) for detections in found]


class PictureFinder:
    """A pipeline, whose pictures are decoded by the reader of training and validation; as NetworkFinder."""

    def __init__(self, pipeline: Pipeline, rules: Suppression, index: DatasetIndex) -> None:
        self._pipeline, self._rules, self._index = pipeline, rules, index
        self.apart = pipeline.backend.compute_apart()

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> Images:
        """Detect on as many pictures at once as the pipeline computes apart."""
        assert meter is None, "a pipeline has no losses"
        images = batch.indices.tolist()
        if self.apart == 1:
            looked = [self._look(image) for image in images]
        else:
            with threads_apart(self.apart, "finding") as pool:
                looked = list(pool.map(self._look, images))
        clock.add("inference", sum(seconds for _, seconds in looked) / self.apart)
        return lambda: [lambda one=one: one for one, _ in looked]  # type: ignore[misc]

    def _look(self, image: int) -> tuple[Detections, float]:
        """What is on an image, and the seconds that finding it takes."""
        picture = read_image(self._index.path(image), rule=self._index.pixels)
        started = time.perf_counter()
        detections = self._pipeline(picture, self._rules).detections
        return detections, time.perf_counter() - started


def _in_original(found: Callable[[], Detections], placement: Tensor, size_hw: tuple[int, int]) -> Detections:
    return undo_letterbox(found(), placement, size_hw)


def _on_host(detections: Detections) -> Detections:
    return Detections(detections.boxes_xyxy.cpu(), detections.scores.cpu(), detections.classes.cpu())
