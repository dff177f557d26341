"""Measure a model on a split: every rank its share of the images, then the shares of all ranks joined."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.feed.loader import ValLoader
from models.detector import DetectionModel
from models.heads.criterion import Criterion
from utils.engine.precision import Precision
from utils.evaluation.curves import Curves, summarize
from utils.evaluation.match_state import MatchState, merge
from utils.evaluation.measurement import Measurement, Settings
from utils.evaluation.sinks import Sink
from utils.evaluation.stopwatch import Stopwatch
from utils.machine.accelerator import Accelerator
from utils.ranks.world import World
from utils.types import Batch, Metrics

TRIAL_IMAGES = 256  # over all ranks, measured in both precisions before half precision is trusted with the others
WORTH_A_TRIAL = 4 * TRIAL_IMAGES  # of a split: below, the trial takes longer than it saves
TOLERANCE = 1e-4  # of mAP50 and mAP50-95, for the two to be equal
LOSS_TOLERANCE = 0.01  # of each loss, as a share of it


@dataclass(frozen=True)
class Evaluation:
    """Everything a validation found, the same on every rank.

    Attributes:
        metrics, curves: the figures, and the curves that are plotted.
        confusion: int64 (nc + 1, nc + 1), rows predicted, columns true, background last.
        matches: of all images, for the bootstrap.
    """

    metrics: Metrics
    curves: Curves
    confusion: NDArray[np.int64]
    matches: MatchState


def evaluate(
    model: DetectionModel,
    loader: ValLoader,
    world: World,
    settings: Settings | None = None,
    *,
    criterion: Criterion[Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> Evaluation:
    """Measure `model` on this rank's share of the images, and join the shares of all ranks.

    Args:
        model: the raw model, in evaluation mode, on world.device; with one class all detections count as class 0.
        loader: this rank's share of a split.
        world: all ranks call this together.
        settings: how to measure.
        criterion: for the validation losses; None = no losses.
        sinks: receive the detections as they are found.
    """
    settings = settings or Settings()
    nc = len(loader.index.names)
    accelerator = world.accelerator

    def measurement(precision: Precision) -> Measurement:
        return Measurement(model, loader.index, world, settings, precision, criterion)

    batches = accelerator.in_advance(loader)
    found = measurement(settings.precision or Precision(accelerator, torch.float32))
    with accelerator.untuned():
        if settings.try_half and accelerator.half_is_faster and len(loader.index) >= WORTH_A_TRIAL:
            half = measurement(Precision(accelerator, accelerator.half_dtype))
            for batch in _first_images(batches, -(-TRIAL_IMAGES // world.size)):
                found.add([batch], sinks)
                half.add([batch])
            if _agree(found, half, nc, world):
                found = half
        found.add(batches, sinks)

    shares = world.all_gather((found.matches.state(), found.confusion.matrix, _totals(found), found.clock.seconds()))
    states, matrices, totals, seconds = zip(*shares, strict=True)
    state = merge(states)
    metrics, curves = summarize(state, nc)
    images_seen = max(metrics.images, 1)
    preparation, inference, nms = (1000 * sum(s[stage] for s in seconds) / images_seen for stage in Stopwatch.STAGES)
    metrics = dataclasses.replace(metrics, losses=_losses(found, totals), speed_ms=(preparation, inference, nms))
    return Evaluation(metrics, curves, sum(matrices), state)


def fused_copy(model: DetectionModel, accelerator: Accelerator) -> DetectionModel:
    """A copy for evaluation, with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse(accelerator.widest)
    return fused.to(accelerator.device).to(memory_format=accelerator.memory_format)


def _first_images(batches: Iterator[Batch], images: int) -> Iterator[Batch]:
    """The first batches, until there are so many images; the others stay in `batches`."""
    seen = 0
    while seen < images and (batch := next(batches, None)) is not None:
        seen += len(batch)
        yield batch


def _agree(exact: Measurement, half: Measurement, nc: int, world: World) -> bool:
    """Whether both measure the same on the images of all ranks so far; the same answer on every rank.

    A model that finds nothing yet is no evidence: its mAP is 0 in any precision, with infinite numbers too.
    """
    shares = world.all_gather([(found.matches.state(), _totals(found)) for found in (exact, half)])
    (ours, our_losses), (theirs, their_losses) = (
        (summarize(merge([state for state, _ in of_ranks]), nc)[0], _losses(found, [total for _, total in of_ranks]))
        for found, of_ranks in zip((exact, half), zip(*shares, strict=True), strict=True)
    )
    return (
        ours.map50 > 0
        and max(abs(ours.map - theirs.map), abs(ours.map50 - theirs.map50)) <= TOLERANCE
        and bool(np.isfinite(our_losses).all())
        and np.allclose(their_losses, our_losses, rtol=LOSS_TOLERANCE, atol=0)
    )


def _totals(found: Measurement) -> NDArray[np.float64] | None:
    """What this rank's losses are made of so far; None where there are none."""
    return None if found.meter is None else found.meter.total()


def _losses(found: Measurement, totals: Iterable[NDArray[np.float64] | None]) -> tuple[float, ...]:
    """The losses over all ranks, from the totals of each; () without a criterion."""
    return () if found.meter is None else found.meter.losses(totals)
