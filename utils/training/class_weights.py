"""Weights of the classes in the loss, from the hyperparameters and the objects of a dataset."""

from __future__ import annotations

import json
import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.utils.config import AUTO, Hyp
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.text import first_of, shown
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

BETA = 0.999  # of the effective number of objects; what Cui et al. take for their large sets


def class_weights(hyp: Hyp, index: DatasetIndex) -> Tensor | None:
    """What `Criterion.class_weights` are for a training on `index`: float32 (C,) on the CPU, or None.

    A class that `hyp` has no weight for has 1. The weights are scaled so that their mean over the objects of the
    dataset is 1.

    Raises:
        ConfigError: a weight is for a class that the dataset does not have.
    """
    if not hyp.class_weights:
        return None
    counts = np.bincount(index.classes, minlength=len(index.names))
    if hyp.class_weights == AUTO:
        weights = by_effective_number(counts)
    else:
        weights = np.ones(len(counts))
        for name, weight in json.loads(hyp.class_weights).items():
            if name not in index.names:
                raise ConfigError(
                    f"class_weights of the hyperparameters: the dataset has no class {shown(name)}."
                    f"{did_you_mean(name, index.names)} Its classes: {first_of(list(map(shown, index.names)), 10)}."
                )
            weights[index.names.index(name)] = weight
    weights /= (weights * counts).sum() / max(counts.sum(), 1) or 1.0  # of a set without objects they stay
    least, most = int(weights.argmin()), int(weights.argmax())
    log.info(
        f"Class weights from {weights[least]:.3g} ({shown(index.names[least])}) to {weights[most]:.3g} "
        f"({shown(index.names[most])})"
    )
    return torch.from_numpy(weights).float()


def by_effective_number(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each class, (C,), one over the effective number of its objects (Cui et al., arXiv 1901.05555).

    That of n objects is (1 − β^n) / (1 − β): n while they are few, and never above 1,000, because another one more and
    more often looks like one that is there. A class without objects counts as one with a single object.
    """
    return (1 - BETA) / (1 - BETA ** np.maximum(counts, 1))
