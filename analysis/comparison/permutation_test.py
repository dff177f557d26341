"""Statistics of a comparison: permutation p-values, Holm's correction, Student's t, required number of images.

In NumPy, as SciPy is no dependency.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05  # of significance
_COUNTED = 10  # extreme rounds from which on their fraction is the p-value
_POINTS = 1001  # of an integral
_TWO_SIDED, _FOUR_OF_FIVE = 1.959964, 0.841621  # quantiles of the normal distribution: 97.5 %, 80 %


def permutation_p_value(observed: float, swapped: NDArray[np.float64], images: int) -> float:
    """Return the two-sided p-value of a difference from those with random images swapped, (R,).

    It is the fraction of rounds with as large a difference, the observed one included. Where they are too few to count,
    the normal tail of the same variance is used, at least 2^(1 - images): no smaller value is possible if `images`
    images can change the difference.
    """
    extreme = int((np.abs(swapped) >= abs(observed) - 1e-12).sum())
    p = (1 + extreme) / (1 + len(swapped))
    if extreme >= _COUNTED or not swapped.any():
        return p
    tail = math.erfc(abs(observed) / math.sqrt(2 * float((swapped**2).mean())))
    return float(min(p, max(tail, 2.0 ** (1 - images))))


def permutation_half_width(swapped: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far from 0 a difference (n,) must be for a p-value below `LEVEL`; `swapped` is (n, R)."""
    extreme = math.ceil(LEVEL * (1 + swapped.shape[1])) - 2  # rounds that may be as far
    return -np.partition(-np.abs(swapped), extreme, axis=1)[:, extreme]


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Correct p-values (n,) for multiple comparisons (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return corrected


def student_tail(t: float, freedom: int) -> float:
    """Return the two-sided tail probability of Student's t with `freedom` degrees of freedom.

    With t = √freedom · tan θ its density is proportional to cos θ ^ (freedom - 1) (Abramowitz and Stegun 26.7).
    """
    start = math.atan(abs(t) / math.sqrt(freedom))
    return _integral(start, freedom) / _integral(0.0, freedom)


def _integral(start: float, freedom: int) -> float:
    """Integrate cos θ ^ (freedom - 1) from `start` to π/2, for freedom >= 1."""
    # Nothing is left beyond twenty standard deviations: the points lie within them.
    end = min(math.pi / 2, start + 20 / math.sqrt(freedom))
    values = np.cos(np.linspace(start, end, _POINTS)).clip(0) ** (freedom - 1)
    weights = np.ones(_POINTS)  # Simpson's rule
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float(weights @ values) * (end - start) / (3 * (_POINTS - 1))


def student_quantile(level: float, freedom: int) -> float:
    """Return the t whose two-sided tail probability is `level`."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > level:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > level else (low, middle)
    return high


def images_needed(difference: float, images: int, image_variance: float, seed_variance: float) -> int | None:
    """Return how many images would show a difference, not 0, in four of five cases; None where no number would.

    The variance of the difference by the choice of the `images` evaluated falls as their number grows; that by the
    choice of trainings does not.
    """
    allowed = (difference / (_TWO_SIDED + _FOUR_OF_FIVE)) ** 2 - seed_variance
    return math.ceil(images * image_variance / allowed) if allowed > 0 else None
