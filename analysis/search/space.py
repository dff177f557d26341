"""Search space: ranges of hyperparameters around their start values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tessera.models.heads.head import LOSS_HYPS, Head
from tessera.utils.config import RENAMED, Hyp, TrainConfig
from tessera.utils.engine.optimizer import Schedule
from tessera.utils.engine.recipe import UNKNOWN_BATCH
from tessera.utils.types import DatasetIndex

FACTOR = 2.0  # the range of a value is its start divided and multiplied by this, on a logarithmic scale
# For these the distance to 1 is scaled.
_MOMENTA = frozenset({"momentum", "warmup_momentum"})
_SCHEDULED = (  # read through `Schedule` or the number of epochs without mosaic alone
    *("warmup_epochs", "warmup_min_batches", "warmup_fraction", "warmup_max_fraction"),
    *("lrf", "flat_fraction", "cosine", "close_mosaic"),
)
# Without effect on a training, choices of the model or of its trained part, and texts.
_FIXED = frozenset({"iou_t", "anchors", "frozen_layers", "fixed_norms", "optimizer", "class_weights"})


def unread_keys(start: Hyp, config: TrainConfig, head: type[Head], train: DatasetIndex, images: int) -> frozenset[str]:
    """Return the hyperparameters that no training of a search reads, or that change nothing in its schedule.

    Args:
        start, config, head: hyperparameters, flags and head of the trainings.
        train, images: training samples, and their number in an epoch.
    """
    unread = set(LOSS_HYPS - head.loss_hyps(len(train.names)))
    if config.rect or start.mosaic == 0:
        unread |= {"mosaic", "mixup", "copy_paste", "close_mosaic"}
    if not len(train.segment_offsets):
        unread.add("copy_paste")  # pastes polygons alone
    if not config.weights:
        unread.add("layer_decay")

    def schedule(**changed: float) -> Any:
        hyp = dataclasses.replace(start, **changed)  # type: ignore[arg-type]
        batch_size = config.batch_size if config.batch_size > 0 else UNKNOWN_BATCH
        found = Schedule(hyp, config.epochs, -(-images // batch_size), batch_size, config.cos_lr)
        closed = round(hyp.close_mosaic * config.epochs) if config.close_mosaic < 0 else 0
        return found.warmup_iterations, closed, [found.factor(epoch) for epoch in range(config.epochs)]

    for key in _SCHEDULED:
        low, high = _range(start, key)
        if schedule(**{key: low}) == schedule(**{key: high}) == schedule():
            unread.add(key)
    return frozenset(unread)


def ranges(start: Hyp, unread: Collection[str], optuna: Any) -> dict[str, Any]:
    """Return a distribution for each searched key, without `unread`.

    A value of 0 stays 0 (an augmentation that is off stays off), and so does an optional key at its default. Counts
    stay integers.
    """
    found = {}
    for f in dataclasses.fields(Hyp):
        if f.name in unread or f.name in _FIXED or f.name not in start.as_dict() or getattr(start, f.name) == 0:
            continue
        low, high = _range(start, f.name)
        if f.metadata["whole"]:
            found[f.name] = optuna.distributions.IntDistribution(max(int(low), 1), int(high), log=True)
        else:
            found[f.name] = optuna.distributions.FloatDistribution(low, high, log=f.name not in _MOMENTA)
    return found


def _range(start: Hyp, key: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a key in a search."""
    (metadata,) = (f.metadata for f in dataclasses.fields(Hyp) if f.name == key)
    value = getattr(start, key)
    near, far = value / FACTOR, value * FACTOR
    if key in _MOMENTA:
        near, far = 1 - (1 - value) * FACTOR, 1 - (1 - value) / FACTOR
    return max(metadata["low"], near), min(metadata["high"], far)


def hyp_of(start: Hyp, values: Mapping[str, float]) -> Hyp:
    """Return the start with other values, rounded to five digits where they differ."""
    metadata = {f.name: f.metadata for f in dataclasses.fields(Hyp)}
    rounded = {
        key: min(max(float(f"{value:.5g}"), metadata[key]["low"]), metadata[key]["high"])
        for key, value in ((RENAMED.get(name, name), value) for name, value in values.items())
        if value != getattr(start, key)
    }
    return dataclasses.replace(start, **rounded)
