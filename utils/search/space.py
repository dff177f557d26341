"""The sets of hyperparameters that a search tries: ranges around those that it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tessera.utils.config import Hyp

REACH = 2.0  # a value is tried from its start divided by this to its start times this, on a logarithmic scale
# Of these the distance to 1 counts: 0.9 and 0.95 are far apart, though not by their ratio.
_MOMENTA = frozenset({"momentum", "warmup_momentum"})
# No effect on a training; another model, or another part of it that is trained; words.
_FIXED = frozenset({"iou_t", "anchors", "frozen_layers", "fixed_norms", "optimizer", "class_weights"})


def ranges(start: Hyp, optuna: Any) -> dict[str, Any]:
    """What is searched: a distribution for each key.

    A value of 0 stays 0: an augmentation that is off is not switched on. So does a key that may be left out and is at
    its default. A count stays a whole number.
    """
    found = {}
    for f in dataclasses.fields(Hyp):
        value = getattr(start, f.name)
        if f.name in _FIXED or f.name not in start.as_dict() or value == 0:
            continue
        low, high, near = f.metadata["low"], f.metadata["high"], value / REACH
        if f.name in _MOMENTA:
            near, far = 1 - (1 - value) * REACH, 1 - (1 - value) / REACH
            found[f.name] = optuna.distributions.FloatDistribution(max(low, near), min(high, far))
        elif f.metadata["whole"]:
            bounds = max(int(low), int(near), 1), min(int(high), int(value * REACH))
            found[f.name] = optuna.distributions.IntDistribution(*bounds, log=True)
        else:
            bounds = max(low, near), min(high, value * REACH)
            found[f.name] = optuna.distributions.FloatDistribution(*bounds, log=True)
    return found


def hyp_of(start: Hyp, values: Mapping[str, float]) -> Hyp:
    """The start with other values, each rounded to five digits; the start's own stay as they are."""
    metadata = {f.name: f.metadata for f in dataclasses.fields(Hyp)}
    rounded = {
        key: min(max(float(f"{value:.5g}"), metadata[key]["low"]), metadata[key]["high"])
        for key, value in values.items()
        if value != getattr(start, key)
    }
    return dataclasses.replace(start, **rounded)
