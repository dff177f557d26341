"""What a validation measures: a network whose rows are suppressed here, or a file that does all of it by itself.

A network sees the images of a batch, letterboxed by the loader. A file with the whole pipeline inside sees each picture
as it was decoded, and answers in its pixels.

Legend: B images, D detections.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
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
from tessera.models.tta import predict_augmented
from tessera.utils.engine.precision import Precision
from tessera.utils.evaluation.stopwatch import Stopwatch
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Batch, DatasetIndex, Detections


class Network(Protocol):
    """A file that holds a bare network (utils/inference/backend.py).

    Attributes:
        needs_suppression: several rows may predict an object.
        has_objectness: rows have an objectness between box and classes.
    """

    needs_suppression: bool
    has_objectness: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Rows (B, A, 4 + C) or (B, A, 5 + C) of float (B, 3, H, W)."""


@runtime_checkable
class PictureNetwork(Protocol):
    """A file that holds the whole pipeline."""

    def detect(self, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
        """Detections of uint8 (H, W, 3) RGB in its pixels, on the host."""


Measurable = DetectionModel | Network | PictureNetwork


class Found(NamedTuple):
    """Detections of one image in pixels of the batch and of the original, on the host."""

    in_batch: Detections
    in_original: Detections
    seconds: float  # of suppression on the host


Images = Callable[[], Sequence[Callable[[], Found]]]  # waits for a batch; then a function for each of its images


class Subject(ABC):
    """Finds the objects on the images of a batch."""

    @abstractmethod
    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> Images:
        """Begin with a batch; its functions change nothing, for they may run in several threads."""


def subject_of(
    model: Measurable,
    rules: Suppression,
    precision: Precision,
    accelerator: Accelerator,
    index: DatasetIndex,
    *,
    augment: bool = False,
) -> Subject:
    """What measures `model`, by what it is.

    Args:
        model: the raw model, in evaluation mode, on the device; or a file.
        rules: which predictions count; what follows from the head is added here.
        precision: to compute in; files have one of their own.
        accelerator: of this rank.
        index: the split, for files that read pictures.
        augment: test-time augmentation; of a DetectionModel.
    """
    if isinstance(model, PictureNetwork):
        return PictureSubject(model, rules, index)
    rows = model.head if isinstance(model, DetectionModel) else model
    iou = rules.iou if rows.needs_suppression else 1.0
    rules = dataclasses.replace(rules, iou=iou, has_objectness=rows.has_objectness)
    return NetworkSubject(model, rules, precision, accelerator, augment=augment)


class NetworkSubject(Subject):
    """A network on the device, with the suppression of this program."""

    def __init__(
        self,
        model: DetectionModel | Network,
        rules: Suppression,
        precision: Precision,
        accelerator: Accelerator,
        *,
        augment: bool,
    ) -> None:
        self._model, self._rules, self._precision, self._accelerator = model, rules, precision, accelerator
        self._augment = augment

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> Images:
        """Let the device compute a batch."""
        clock.begin()
        images = batch.images_on(self._accelerator.device)
        clock.lap("preparation")
        with self._precision.autocast():
            if self._augment:
                assert isinstance(self._model, DetectionModel), type(self._model)
                decoded, raw = predict_augmented(self._model, images), []
            else:
                output = self._model(images)
                decoded, raw = output if isinstance(output, tuple) else (output, [])
        clock.lap("inference")
        found = self._select(decoded, clock)
        if meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            assignment = meter.criterion.assign(batch.targets, len(batch), size_hw)
            meter.update(raw, self._accelerator.send(assignment))
        placed = list(zip(batch.placements, batch.sizes_hw.tolist(), strict=True))
        return lambda: [
            partial(_undone, one, placement, (height, width))
            for one, (placement, (height, width)) in zip(found(), placed, strict=True)
        ]

    def _select(self, decoded: Tensor, clock: Stopwatch) -> Callable[[], list[Callable[[], Detections]]]:
        """Detections of a batch. Without a queue on the device, the fewest operations; with one, no waiting."""
        if self._accelerator.queue_depth:
            copied = self._accelerator.read_back(strongest_candidates(decoded, self._rules))
            clock.lap("nms")
            return lambda: [partial(suppress_candidates, rows, self._rules) for rows in copied()]
        found = non_max_suppression(decoded, self._rules, self._accelerator.widest)
        clock.lap("nms")
        return lambda: [partial(_on_host, detections) for detections in found]


class PictureSubject(Subject):
    """A file that takes whole pictures; they are decoded by the reader of training and validation."""

    def __init__(self, model: PictureNetwork, rules: Suppression, index: DatasetIndex) -> None:
        self._model, self._rules, self._index = model, rules, index

    def launch(self, batch: Batch, clock: Stopwatch, meter: LossMeter | None) -> Images:
        """Detect on one picture after the other."""
        assert meter is None, "a file has no losses"
        found = []
        for image, placement in zip(batch.indices.tolist(), batch.placements, strict=True):
            picture = read_image(self._index.path(image), rule=self._index.pixels)
            started = time.perf_counter()
            in_original = self._model.detect(picture, self._rules)
            clock.add("inference", time.perf_counter() - started)
            found.append(Found(_placed(in_original, placement), in_original, 0.0))
        return lambda: [partial(_same, one) for one in found]


def _undone(found: Callable[[], Detections], placement: Tensor, size_hw: tuple[int, int]) -> Found:
    started = time.perf_counter()
    in_batch = found()
    seconds = time.perf_counter() - started
    return Found(in_batch, undo_letterbox(in_batch, placement, size_hw), seconds)


def _placed(detections: Detections, placement: Tensor) -> Detections:
    """Boxes of the original image in pixels of the batch: scale_x, scale_y, left, top in `placement` (4,)."""
    scale, offset = placement[[0, 1, 0, 1]], placement[[2, 3, 2, 3]]
    return Detections((detections.boxes_xyxy * scale + offset).float(), detections.scores, detections.classes)


def _on_host(detections: Detections) -> Detections:
    return Detections(detections.boxes_xyxy.cpu(), detections.scores.cpu(), detections.classes.cpu())


def _same(found: Found) -> Found:
    return found


def with_one_class(detections: Detections) -> Detections:
    """The same detections, all of class 0."""
    return Detections(detections.boxes_xyxy, detections.scores, torch.zeros_like(detections.classes))
