"""Judgement of an epoch that learned nothing, from its losses and its fitness."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

FEW_OBJECTS = 8  # in train: augmentation may remove fewer from all images of an epoch, whose loss is then 0
COLLAPSED = 0.1  # of the best fitness: an epoch below has lost what was learned; noise and warm-ups cost less
FEW_DETECTED = 5  # objects: in a small validation set chance alone may lose fewer
IDLE_REMEDY = (
    "The objects may be too small at this --imgsz, the anchors may fit none, or a loss of your own may be wrong."
)
COLLAPSE_REMEDY = "Lower lr0 or lengthen the warm-up (--hyp), or try --amp off."


def idle_losses(losses: Mapping[str, float], unused: frozenset[str], objects: int) -> list[str]:
    """Return the losses of an epoch that were exactly 0 although train has objects, so that nothing was matched."""
    if objects < FEW_OBJECTS:
        return []
    return [name for name, loss in losses.items() if loss == 0 and name not in unused]


def has_collapsed(fitness: float, best: float, objects_per_class: NDArray[np.int64]) -> bool:
    """Return whether the fitness of an epoch is so far below the best one that no chance explains it."""
    return fitness < COLLAPSED * best and least_detected(best, objects_per_class) >= FEW_DETECTED


def least_detected(fitness: float, objects_per_class: NDArray[np.int64]) -> float:
    """Return a lower bound of the objects that are detected in a validation with this fitness.

    The AP of a class is at most its recall, and the mean is reached with the fewest objects by the rarest classes.
    """
    counts = np.sort(objects_per_class[objects_per_class > 0])
    return float(np.interp(fitness * len(counts), np.arange(len(counts) + 1), np.append(0, counts.cumsum())))
