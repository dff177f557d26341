"""AutoAnchor: check whether anchors fit the labels, and fit better ones by k-means and mutation.

A label is learnable only if both sides are within a factor `anchor_t` of some anchor's. The distance is logarithmic:
max over both sides of |log label - log anchor|; exp(-distance) is the ratio of the worse side.

Legend: M labels, A anchors of all layers, L layers. Sizes are width, height in pixels of the training size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tessera.models.heads.anchor.head import Detect

SUFFICIENT_RECALL = 0.98
SMALLEST_SIDE = 2.0  # px; smaller labels are noise
MUTATION_PROBABILITY, MUTATION_SIGMA = 0.9, 0.1  # of each side; largest standard deviation of the factors
KMEANS_ROUNDS = 30  # at most
LARGEST_FIT = 20_000  # labels; more are slower and no better
GENERATIONS = 1000  # mutations tried


def best_possible_recall(
    wh: NDArray[np.floating], anchors: NDArray[np.floating], anchor_t: float
) -> tuple[float, float]:
    """Return the fraction of labels (M, 2) that fit an anchor (A, 2), and the mean number of fitting anchors."""
    if len(wh) == 0:
        return 0.0, 0.0
    fits = _distance(_log(wh), _log(anchors)) < math.log(anchor_t)
    return float(fits.any(1).mean()), float(fits.sum(1).mean())


def kmeans_anchors(wh: NDArray[np.floating], n: int, anchor_t: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Fit anchors to the labels: k-means, then random mutations of which improvements are kept.

    Labels below 2 px are ignored, and at most 20,000 of the others sampled. Each is scaled by a random factor of
    0.9-1.1, which separates equal labels. The fitness is the mean over the labels (M, 2) of the ratio of the worse side
    to the best anchor, 0 if beyond `anchor_t`. At least `n` labels of 2 px are required.

    Returns:
        float32 (n, 2), in order of area.
    """
    usable = wh[(wh >= SMALLEST_SIDE).all(1)].astype(np.float64)
    assert len(usable) >= n, (len(usable), n)
    if len(usable) > LARGEST_FIT:
        usable = usable[rng.choice(len(usable), LARGEST_FIT, replace=False)]
    usable = usable * rng.uniform(0.9, 1.1, usable.shape)

    spread = usable.std(0)
    spread[spread < 1e-9] = 1.0
    anchors = _kmeans(usable / spread, n, rng) * spread
    anchors = _evolve(_log(usable), anchors, anchor_t, rng)
    return anchors[np.argsort(anchors.prod(1), kind="stable")].astype(np.float32)


def fit_anchors(
    head: Detect, wh: NDArray[np.floating], anchor_t: float, rng: np.random.Generator
) -> tuple[NDArray[np.float32], str]:
    """Return the head's anchors if they fit more than 98 % of the labels, else fitted ones if these are better.

    `wh`, (M, 2), are sizes of the training labels at the training size; `anchor_t` is the largest ratio of sides
    between a label and its anchor. Anchors are float32 (L, A / L, 2) in pixels, followed by a message for the log.
    """
    strides = np.array(head.strides)
    own = head.anchors.detach().cpu().double().numpy() * strides[:, None, None]
    own_px = own.astype(np.float32)
    flat = own.reshape(-1, 2)
    recall, per_label = best_possible_recall(wh, flat, anchor_t)
    if recall > SUFFICIENT_RECALL:
        return own_px, f"AutoAnchor: {per_label:.2f} anchors per label, best possible recall {recall:.4f}: a good fit."
    usable = int((wh >= SMALLEST_SIDE).all(1).sum())
    if usable < len(flat):
        return own_px, (
            f"AutoAnchor: {usable} labels with sides of at least 2 px are too few for {len(flat)} anchors; keeping "
            f"the model's anchors (best possible recall {recall:.4f}). Use a larger --imgsz, or more labels."
        )
    fitted = kmeans_anchors(wh, len(flat), anchor_t, rng)
    new_recall, _ = best_possible_recall(wh, fitted, anchor_t)
    if new_recall <= recall:
        return own_px, (
            f"AutoAnchor: keeping the model's anchors: best possible recall {recall:.4f}, with fitted anchors "
            f"{new_recall:.4f}."
        )
    per_layer = np.empty_like(own, dtype=np.float32)
    per_layer[np.argsort(strides, kind="stable")] = fitted.reshape(own.shape)
    sizes = ", ".join(f"{w:.0f}x{h:.0f}" for w, h in fitted)
    return per_layer, (
        f"AutoAnchor: new anchors raise the best possible recall from {recall:.4f} to {new_recall:.4f}: {sizes}."
    )


def _log(wh: NDArray[np.floating]) -> NDArray[np.float64]:
    # A side of 0 counts as 0.000001 px.
    return np.log(np.maximum(wh, 1e-6, dtype=np.float64))


def _distance(log_wh: NDArray[np.float64], log_anchors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log ratio of the worse side: (M, 2) and (A, 2) to (M, A)."""
    return np.maximum(np.abs(log_wh[:, :1] - log_anchors[:, 0]), np.abs(log_wh[:, 1:] - log_anchors[:, 1]))


def _fitness(log_wh: NDArray[np.float64], anchors: NDArray[np.float64], anchor_t: float) -> float:
    nearest = _distance(log_wh, _log(anchors)).min(1)
    return float((np.exp(-nearest) * (nearest < math.log(anchor_t))).mean())


def _kmeans(points: NDArray[np.float64], k: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Run Lloyd's algorithm on (M, 2) points, M >= k, from k-means++ (Arthur and Vassilvitskii, SODA 2007)."""
    centres = points[rng.integers(len(points))][None]
    nearest = ((points - centres) ** 2).sum(1)
    while len(centres) < k:
        weight = nearest + 1e-12  # coinciding points may be chosen again
        chosen = points[rng.choice(len(points), p=weight / weight.sum())]
        centres = np.concatenate((centres, chosen[None]))
        nearest = np.minimum(nearest, ((points - chosen) ** 2).sum(1))

    for _ in range(KMEANS_ROUNDS):
        # |p - c|² without |p|², which is the same for every centre
        closest = ((centres**2).sum(1) - 2 * points @ centres.T).argmin(1)
        size = np.bincount(closest, minlength=k)
        total = np.stack([np.bincount(closest, points[:, side], k) for side in (0, 1)], 1)
        moved = np.where(size[:, None] > 0, total / np.maximum(size, 1)[:, None], centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres


def _evolve(
    log_wh: NDArray[np.float64], anchors: NDArray[np.float64], anchor_t: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Multiply sides by random factors, normal around 1 and within 0.3-3, and keep improvements."""
    best = _fitness(log_wh, anchors, anchor_t)
    for _ in range(GENERATIONS):
        mutated = rng.random(anchors.shape) < MUTATION_PROBABILITY
        factor = np.where(mutated, 1 + rng.standard_normal(anchors.shape) * rng.random() * MUTATION_SIGMA, 1.0).clip(
            0.3, 3.0
        )
        candidate = np.maximum(anchors * factor, SMALLEST_SIDE)
        fitness = _fitness(log_wh, candidate, anchor_t)
        if fitness > best:
            best, anchors = fitness, candidate
    return anchors
