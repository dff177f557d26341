"""Class weights for the loss, from the hyperparameters and the objects of a dataset."""

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

BETA = 0.999  # of the effective number of objects, as in Cui et al.


def class_weights(hyp: Hyp, index: DatasetIndex) -> Tensor | None:
    """Return `Criterion.class_weights` for a training on `index`: float32 (C,) on the CPU, or None.

    Classes that `hyp` does not name weigh 1. The mean weight over the objects of the dataset is scaled to 1.

    Raises:
        ConfigError: a weight for a class that the dataset does not have.
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
                    f"Hyperparameter class_weights: the dataset has no class {shown(name)}."
                    f"{did_you_mean(name, index.names)} Its classes: {first_of(list(map(shown, index.names)), 10)}."
                )
            weights[index.names.index(name)] = weight
    weights /= (weights * counts).sum() / max(counts.sum(), 1) or 1.0  # unchanged without objects
    least, most = int(weights.argmin()), int(weights.argmax())
    log.info(
        f"Class weights from {weights[least]:.3g} ({shown(index.names[least])}) to {weights[most]:.3g} "
        f"({shown(index.names[most])})"
    )
    return torch.from_numpy(weights).float()


def by_effective_number(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights (C,) of one over the effective number of objects of each class (Cui et al., arXiv 1901.05555).

    The effective number of n objects is (1 − β^n) / (1 − β): about n for few, and at most 1,000. A class without
    objects counts as having one.
    """
    return (1 - BETA) / (1 - BETA ** np.maximum(counts, 1))
