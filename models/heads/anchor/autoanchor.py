"""AutoAnchor: do the anchors fit the labels, and if not, which would?

A label can be learned only where some anchor's sides are within a factor `anchor_t` of its own: a distance in
logarithms, max over both sides of |log label - log anchor|. exp(-distance) is the ratio of the worse side.

Legend: M labels, A anchors of all layers, L layers. Sizes are width, height in pixels of the training size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tessera.models.heads.anchor.head import Detect

SUFFICIENT_RECALL = 0.98
SMALLEST_SIDE = 2.0  # px; smaller labels are noise that anchors should not be fitted to
MUTATED_SHARE, MUTATION_SIGMA = 0.9, 0.1  # of the sides in a generation; largest standard deviation of their factors
KMEANS_ROUNDS = 30  # at most; fewer where nothing moves any more
LARGEST_FIT = 20_000  # labels; more make the search slower and its result no better
GENERATIONS = 1000  # mutations tried


def best_possible_recall(
    wh: NDArray[np.floating], anchors: NDArray[np.floating], anchor_t: float
) -> tuple[float, float]:
    """Share of labels (M, 2) that some anchor (A, 2) fits, and the mean number of anchors that fit one; 0 of none."""
    if len(wh) == 0:
        return 0.0, 0.0
    fits = _distance(_log(wh), _log(anchors)) < math.log(anchor_t)
    return float(fits.any(1).mean()), float(fits.sum(1).mean())


def kmeans_anchors(wh: NDArray[np.floating], n: int, anchor_t: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Anchors for the labels: k-means, then random mutations of which the improvements are kept.

    Labels below 2 px are left out, and at most 20,000 sampled from the rest. Each is scaled by a factor in 0.9-1.1, as
    augmentation will: that separates labels that are all alike.

    The fitness is the mean over the labels (M, 2) of the smaller ratio (lesser side by greater) to the best anchor, 0
    where that is beyond `anchor_t`. There must be at least `n` labels of at least 2 px.

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


def check_anchors(
    head: Detect, wh: NDArray[np.floating], anchor_t: float, rng: np.random.Generator
) -> tuple[NDArray[np.float32], str]:
    """AutoAnchor: keep the head's anchors where they fit at least 98 % of the labels; else look for better ones.

    Args:
        head: its anchors and strides are read.
        wh: (M, 2), sizes of the training labels at the training size.
        anchor_t: largest ratio of sides between a label and its anchor.
        rng: source of all randomness.

    Returns:
        The anchors to train with, float32 (L, A / L, 2) in pixels, the head's own or new ones; and a line for the user.
    """
    strides = np.array(head.strides)
    own = head.anchors.detach().cpu().double().numpy() * strides[:, None, None]
    kept = own.astype(np.float32)
    flat = own.reshape(-1, 2)
    recall, per_label = best_possible_recall(wh, flat, anchor_t)
    if len(wh) == 0:
        return kept, "AutoAnchor: no labels to fit anchors to, the model's own are kept."
    if recall > SUFFICIENT_RECALL:
        return kept, f"AutoAnchor: {per_label:.2f} anchors a label, best possible recall {recall:.4f}: a good fit."
    usable = int((wh >= SMALLEST_SIDE).all(1).sum())
    if usable < len(flat):
        return kept, (
            f"AutoAnchor: the model's own anchors are kept, best possible recall {recall:.4f}: {usable} labels with "
            f"sides of at least 2 px are too few to fit {len(flat)} others to. A larger --imgsz, or more labels, would "
            f"change that."
        )
    fitted = kmeans_anchors(wh, len(flat), anchor_t, rng)
    new_recall, _ = best_possible_recall(wh, fitted, anchor_t)
    if new_recall <= recall:
        return kept, (
            f"AutoAnchor: the model's own anchors are kept: their best possible recall, {recall:.4f}, is at least that "
            f"of fitted ones, {new_recall:.4f}."
        )
    per_layer = np.empty_like(own, dtype=np.float32)
    per_layer[np.argsort(strides, kind="stable")] = fitted.reshape(own.shape)
    sizes = ", ".join(f"{w:.0f}x{h:.0f}" for w, h in fitted)
    return per_layer, (
        f"AutoAnchor: new anchors raise the best possible recall from {recall:.4f} to {new_recall:.4f}: {sizes}."
    )


def set_anchors(head: Detect, anchors_px: NDArray[np.floating]) -> None:
    """Set the anchors of a head, (L, A / L, 2) in pixels; in place, so that every holder of the buffer sees them."""
    assert anchors_px.shape == tuple(head.anchors.shape), (anchors_px.shape, head.anchors.shape)
    pixels = torch.as_tensor(anchors_px).to(head.anchors)
    with torch.no_grad():
        head.anchors.copy_(pixels / head.anchors.new_tensor(head.strides)[:, None, None])


def _log(wh: NDArray[np.floating]) -> NDArray[np.float64]:
    # A side of 0 is as far from every anchor as a side of 0.000001 px.
    return np.log(np.maximum(wh, 1e-6, dtype=np.float64))


def _distance(log_wh: NDArray[np.float64], log_anchors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of the worse ratio of sides: (M, 2) and (A, 2) to (M, A)."""
    return np.maximum(np.abs(log_wh[:, :1] - log_anchors[:, 0]), np.abs(log_wh[:, 1:] - log_anchors[:, 1]))


def _fitness(log_wh: NDArray[np.float64], anchors: NDArray[np.float64], anchor_t: float) -> float:
    nearest = _distance(log_wh, _log(anchors)).min(1)
    return float((np.exp(-nearest) * (nearest < math.log(anchor_t))).mean())


def _kmeans(points: NDArray[np.float64], k: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Lloyd's algorithm on (M, 2) points, M >= k, started by k-means++ (Arthur and Vassilvitskii, SODA 2007)."""
    centres = points[rng.integers(len(points))][None]
    nearest = ((points - centres) ** 2).sum(1)
    while len(centres) < k:
        weight = nearest + 1e-12  # points that coincide may be chosen again
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
    """Multiply sides by random factors, normal around 1 and within 0.3-3, and keep what is fitter."""
    best = _fitness(log_wh, anchors, anchor_t)
    for _ in range(GENERATIONS):
        mutated = rng.random(anchors.shape) < MUTATED_SHARE
        factor = np.where(mutated, 1 + rng.standard_normal(anchors.shape) * rng.random() * MUTATION_SIGMA, 1.0).clip(
            0.3, 3.0
        )
        candidate = np.maximum(anchors * factor, SMALLEST_SIDE)
        fitness = _fitness(log_wh, candidate, anchor_t)
        if fitness > best:
            best, anchors = fitness, candidate
    return anchors
