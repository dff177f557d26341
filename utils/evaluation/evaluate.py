"""Measure a model on a split: every rank its share of the images, then the shares of all ranks joined."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.feed.loader import ValLoader
from models.detector import DetectionModel
from models.heads.criterion import Criterion, LossMeter
from models.suppression import non_max_suppression, undo_letterbox
from models.tta import predict_augmented
from utils.engine.precision import Precision
from utils.evaluation.average_precision import Accumulator, Curves, MatchState, merge, summarize
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.matching import match_image
from utils.evaluation.sinks import Sink
from utils.evaluation.stopwatch import Stopwatch
from utils.machine.accelerator import Accelerator
from utils.ranks.world import World
from utils.types import DatasetIndex, Detections, Metrics


@dataclass(frozen=True)
class Evaluation:
    """Everything a validation found, the same on every rank.

    Attributes:
        metrics, curves: the figures, and what their plots draw.
        confusion: int64 (nc + 1, nc + 1), rows predicted, columns true, background last.
        matches: of all images, for the bootstrap.
    """

    metrics: Metrics
    curves: Curves
    confusion: NDArray[np.int64]
    matches: MatchState


@torch.no_grad()
def evaluate(
    model: DetectionModel,
    loader: ValLoader,
    index: DatasetIndex,
    world: World,
    *,
    conf: float = 0.001,
    iou: float = 0.6,
    max_det: int = 300,
    criterion: Criterion[Any] | None = None,
    precision: Precision | None = None,
    augment: bool = False,
    sinks: Sequence[Sink] = (),
) -> Evaluation:
    """Measure `model` on this rank's share of the images, and join the shares of all ranks.

    Args:
        model: the raw model, in evaluation mode, on world.device; with one class all detections count as class 0.
        loader: this rank's share of `index`.
        index: the whole split, whose labels count.
        world: all ranks call this together.
        conf, iou, max_det: of non-maximum suppression.
        criterion: for the validation losses; None = no losses.
        precision: to compute in; None = float32.
        augment: test-time augmentation (no losses then).
        sinks: see the detections as they come.
    """
    precision = precision or Precision(world.accelerator, torch.float32)
    clock = Stopwatch(world.accelerator)
    matches, confusion = Accumulator(), ConfusionMatrix(len(index.names))
    meter = LossMeter(criterion) if criterion is not None and not augment else None

    for batch in loader:
        clock.begin()
        images = batch.images_on(world.device)
        clock.lap("preparation")
        with precision.autocast():
            decoded, raw = (predict_augmented(model, images), []) if augment else model(images)
        clock.lap("inference")
        one_class = len(index.names) == 1  # then labels of one box are duplicates
        found = non_max_suppression(
            decoded,
            conf,
            iou,
            has_objectness=model.head.has_objectness,
            max_det=max_det,
            multi_label=not one_class,
            agnostic=one_class,
            widest=world.accelerator.widest,
        )
        clock.lap("nms")
        if meter is not None:
            size_hw = (images.shape[2], images.shape[3])
            meter.update(raw, world.accelerator.send(meter.criterion.assign(batch.targets, len(batch), size_hw)))
        in_batch = [_on_host(detections, one_class) for detections in found]
        in_original = [
            undo_letterbox(detections, placement, (int(height), int(width)))
            for detections, placement, (height, width) in zip(in_batch, batch.placements, batch.sizes_hw, strict=True)
        ]
        for image, detections in zip(batch.indices.tolist(), in_original, strict=True):
            classes, boxes_xyxy = index.labels(image)
            matches.add(image, match_image(detections, boxes_xyxy, classes))
            confusion.add(detections, boxes_xyxy, classes)
        for sink in sinks:
            sink.add(batch, in_batch, in_original)

    shares = world.all_gather((matches.state(), confusion.matrix, meter and meter.total(), clock.seconds))
    states, matrices, totals, seconds = zip(*shares, strict=True)
    state = merge(states)
    metrics, curves = summarize(state, len(index.names))
    images_seen = max(metrics.images, 1)
    preparation, inference, nms = (1000 * sum(s[stage] for s in seconds) / images_seen for stage in Stopwatch.STAGES)
    if meter is not None:
        metrics = dataclasses.replace(metrics, losses=meter.losses(totals))
    metrics = dataclasses.replace(metrics, speed_ms=(preparation, inference, nms))
    return Evaluation(metrics, curves, sum(matrices), state)


def fused_copy(model: DetectionModel, accelerator: Accelerator) -> DetectionModel:
    """A copy for evaluation, with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse(accelerator.widest)
    return fused.to(accelerator.device).to(memory_format=accelerator.memory_format)


def _on_host(detections: Detections, one_class: bool) -> Detections:
    classes = detections.classes.cpu()
    return Detections(
        detections.boxes_xyxy.cpu(), detections.scores.cpu(), torch.zeros_like(classes) if one_class else classes
    )
