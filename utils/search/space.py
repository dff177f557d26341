"""Search space: ranges of hyperparameters around their start values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tessera.utils.config import RENAMED, Hyp

FACTOR = 2.0  # the range of a value is its start divided and multiplied by this, on a logarithmic scale
# For these the distance to 1 is scaled.
_MOMENTA = frozenset({"momentum", "warmup_momentum"})
# Without effect on a training, choices of the model or of its trained part, and texts.
_FIXED = frozenset({"iou_t", "anchors", "frozen_layers", "fixed_norms", "optimizer", "class_weights"})


def ranges(start: Hyp, optuna: Any) -> dict[str, Any]:
    """Return a distribution for each searched key.

    A value of 0 stays 0 (an augmentation that is off stays off), and so does an optional key at its default. Counts
    stay integers.
    """
    found = {}
    for f in dataclasses.fields(Hyp):
        value = getattr(start, f.name)
        if f.name in _FIXED or f.name not in start.as_dict() or value == 0:
            continue
        low, high, near = f.metadata["low"], f.metadata["high"], value / FACTOR
        if f.name in _MOMENTA:
            near, far = 1 - (1 - value) * FACTOR, 1 - (1 - value) / FACTOR
            found[f.name] = optuna.distributions.FloatDistribution(max(low, near), min(high, far))
        elif f.metadata["whole"]:
            bounds = max(int(low), int(near), 1), min(int(high), int(value * FACTOR))
            found[f.name] = optuna.distributions.IntDistribution(*bounds, log=True)
        else:
            bounds = max(low, near), min(high, value * FACTOR)
            found[f.name] = optuna.distributions.FloatDistribution(*bounds, log=True)
    return found


def hyp_of(start: Hyp, values: Mapping[str, float]) -> Hyp:
    """Return the start with other values, rounded to five digits where they differ."""
    metadata = {f.name: f.metadata for f in dataclasses.fields(Hyp)}
    rounded = {
        key: min(max(float(f"{value:.5g}"), metadata[key]["low"]), metadata[key]["high"])
        for key, value in ((RENAMED.get(name, name), value) for name, value in values.items())
        if value != getattr(start, key)
    }
    return dataclasses.replace(start, **rounded)
