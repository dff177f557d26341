"""Distributed evaluation of a model on a split: each rank its images, gathered on rank 0."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import ValLoader, build_val_loader
from tessera.deploy.runtime.pipeline import Pipeline
from tessera.models.heads.criterion import Criterion
from tessera.utils.evaluation.average_precision import Ranking, rank
from tessera.utils.evaluation.backend import Backend, ImageBackend
from tessera.utils.evaluation.curves import Curves, summarize
from tessera.utils.evaluation.error_counts import Errors, count_errors
from tessera.utils.evaluation.matches import Matches
from tessera.utils.evaluation.predictors import DetectionCollector, EvaluatedModel, Settings, ShardEvaluation, Stopwatch
from tessera.utils.ranks.world import World
from tessera.utils.thresholds import MAX_DET
from tessera.utils.types import Batch, DatasetIndex, Metrics

VOTE_S = 5.0  # seconds between two votes on stopping


class EvaluationStopped(Exception):
    """A stop was requested on a rank, and all ranks have ended the validation."""


@dataclass(frozen=True)
class Evaluation:
    """Result of a validation. All but the metrics is on rank 0 alone, and empty on the others.

    `errors` are those at `metrics.confidence`, which has the best F1 unless it has another `origin`; empty where
    they are not counted.
    """

    metrics: Metrics
    curves: Curves
    ranking: Ranking
    errors: Errors
    matches: Matches
    origin: str = ""
    max_det: int = MAX_DET


def evaluate_split(
    model: Backend | ImageBackend | Pipeline,
    index: DatasetIndex,
    world: World,
    imgsz: int,
    settings: Settings,
    *,
    batch_size: int,
    workers: int,
    collectors: Sequence[DetectionCollector] = (),
) -> Evaluation:
    """Evaluate an opened model, or a pipeline around it, on a split.

    `imgsz` is the long side of the images in pixels; `batch_size` and `workers` are those of a rank.
    """
    backend = model.backend if isinstance(model, Pipeline) else model
    with (
        open_images(index, imgsz, "none", "area", world) as store,
        build_val_loader(
            store,
            world,
            batch_size=batch_size,
            stride=backend.stride,
            workers=workers,
            size_hw=backend.size_hw if isinstance(backend, Backend) else None,
        ) as loader,
    ):
        return evaluate(model, loader, world, settings, collectors=collectors)


def evaluate(
    model: EvaluatedModel,
    loader: ValLoader,
    world: World,
    settings: Settings | None = None,
    *,
    criterion: Criterion[Any] | None = None,
    collectors: Sequence[DetectionCollector] = (),
) -> Evaluation:
    """Evaluate `model` on this rank's images, and gather the results of all ranks.

    Args:
        model: raw model of a training, in evaluation mode, on world.device; an opened model; or a pipeline around one.
        criterion: for the validation losses of a raw model; None = no losses.

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
    ranking = rank(matches)
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
    counted = count_errors(matches if settings.errors else Matches.joined([]), index, metrics.confidence)
    return Evaluation(metrics, curves, ranking, counted, matches, origin, settings.max_det)
