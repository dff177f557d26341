"""Anchor-based head of YOLOv5: anchors of the model YAML, one 1×1 convolution per level, decoding, and AutoAnchor.

AutoAnchor checks whether the anchors fit the labels, and fits better ones by k-means and mutation. A label is learnable
only if both sides are within a factor `anchor_t` of some anchor's. The distance is logarithmic: max over both sides of
|log label - log anchor|; exp(-distance) is the ratio of the worse side.

Legend: B images, nl levels, na anchors per level, A = Σ na·ny·nx rows, nc classes, no = 5 + nc. In AutoAnchor M labels
and A anchors of all levels, sizes in pixels of the training size.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tessera.models.heads.anchor_loss import AnchorLoss
from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.grid import arange_like
from tessera.models.heads.head import Head, HeadSpec, Output, object_prior
from tessera.models.layers.yaml_arguments import count, one_of, positive, read_arguments
from tessera.utils.errors import ConfigError
from tessera.utils.text import plural

log = logging.getLogger(__name__)

MAX_ANCHORS = 64  # a level
SUFFICIENT_RECALL = 0.98
SMALLEST_SIDE = 2.0  # px; smaller labels are noise
MUTATION_PROBABILITY, MUTATION_SIGMA = 0.9, 0.1  # of each side; largest standard deviation of the factors
KMEANS_ROUNDS = 30  # at most
LARGEST_FIT = 20_000  # labels; more are slower and no better
GENERATIONS = 1000  # mutations tried


def read_anchors(value: object) -> list[list[float]] | int:
    """Read anchors in pixels, a row of w, h, w, h … (or of [w, h] pairs) per level; or their number per level."""
    if isinstance(value, int):
        if count(value) > MAX_ANCHORS:
            raise ValueError(f"at most {MAX_ANCHORS} anchors a level")
        return value
    expected = "one row of width, height, width, height … per level, all of one length, or a number of anchors"
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(row, (list, tuple)) for row in value):
        raise ValueError(expected)
    rows: list[list[float]] = []
    for row in value:
        flat = itertools.chain.from_iterable(side if isinstance(side, (list, tuple)) else (side,) for side in row)
        rows.append([positive(side) for side in flat])
    if len({len(row) for row in rows}) != 1 or len(rows[0]) % 2 or not rows[0]:
        raise ValueError(expected)
    return rows


class Detect(Head):
    """`[[…], 1, Detect, [nc, anchors]]` with the YAML key `anchors`: sizes in pixels per level, or a number per level.

    Args:
        nc: number of classes.
        anchors: one row of width, height, width, height … in pixels per level; or the number of anchors per level,
            which start as squares of 4·stride·2^(i/na) pixels, the sizes of RetinaNet (Lin et al. 2017).
        channels: of each level's map.
        strides: pixels per cell of each level.
    """

    has_objectness = True
    yaml_keys = MappingProxyType({"anchors": read_anchors})
    yaml_tensors = ("anchors",)
    outputs_before_classes = 5

    anchors: Tensor  # buffer (nl, na, 2), width and height in grid units (pixels / stride)

    def __init__(
        self, nc: int, anchors: Sequence[Sequence[float]] | int, channels: Sequence[int], strides: Sequence[float]
    ) -> None:
        super().__init__(nc, strides)
        if isinstance(anchors, int):
            sides = [[4 * stride * 2 ** (i / anchors) for i in range(anchors)] for stride in strides]
            anchors = [[side for side in row for _ in range(2)] for row in sides]
        assert len(anchors) == len(channels) == len(strides), (anchors, channels, strides)
        self.no = nc + 5
        self.nl = len(channels)
        self.na = self.rows_per_cell = len(anchors[0]) // 2
        pixels = torch.tensor(anchors, dtype=torch.float32).view(self.nl, self.na, 2)
        self.register_buffer("anchors", pixels / torch.tensor(self.strides).view(-1, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, self.no * self.na, 1) for c in channels)
        self._init_from_priors()

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> Detect:
        read_arguments(spec.where, spec.arguments, (("nc", one_of("nc")), ("anchors", one_of("anchors"))))
        anchors = spec.keys["anchors"]
        if not isinstance(anchors, int) and len(anchors) != len(spec.channels):
            raise ConfigError(
                f"{spec.where}: reads {plural(len(spec.channels), 'layer')}, but `anchors` has "
                f"{plural(len(anchors), 'row')}. Give one row per layer."
            )
        return cls(spec.nc, anchors, spec.channels, spec.strides)

    def class_layers(self) -> list[str]:
        return [f"m.{level}" for level in range(self.nl)]

    @torch.no_grad()
    def _init_from_priors(self) -> None:
        """Initialise the biases to the object prior of a new dataset, and 0.6 / nc per class."""
        for conv, stride in zip(self.m, self.strides, strict=True):
            bias = cast(Tensor, cast(nn.Conv2d, conv).bias).view(self.na, self.no)
            bias[:, 4] += math.log(object_prior(stride))
            bias[:, 5:] += math.log(0.6 / (self.nc - 0.99999))

    def forward(self, features: list[Tensor]) -> Output:
        """Return nl raw tensors (B, na, ny, nx, no) of nl maps (B, C, ny, nx): logits, views of the conv outputs.

        In evaluation mode return (decoded, raw), with decoded float32 (B, A, no) as of `decode`.
        """
        raw = []
        for conv, x in zip(self.m, features, strict=True):
            y = conv(x)
            b, _, ny, nx = y.shape
            # A view; in channels-last memory the outputs of a row stay contiguous.
            raw.append(y.view(b, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2))
        return raw if self.training else (self.decode(raw), raw)

    def decode(self, raw: Sequence[Tensor]) -> Tensor:
        """Decode raw outputs: xy = (2σ − 0.5 + cell)·stride, wh = (2σ)²·anchor, the rest σ.

        Computed in float32 for any model dtype, because float16 has steps of a pixel from 1024 on.

        Returns:
            float32 (B, A, no): cx, cy, w, h in pixels, objectness, class probabilities; rows level by level, in a level
            by anchor, then y, then x.
        """
        return torch.cat([self.decode_level(level, y) for level, y in enumerate(raw)], 1)

    def decode_level(self, level: int, raw: Tensor) -> Tensor:
        """Decode raw outputs of a level, or the first of them, at least 4."""
        ny, nx = raw.shape[2:4]
        rows, columns = arange_like(ny, raw), arange_like(nx, raw)
        cells = torch.stack((columns.expand(ny, nx), rows[:, None].expand(ny, nx)), -1)
        stride = self.strides[level]
        anchors = (self.anchors[level].float() * stride).view(self.na, 1, 1, 2)
        xy, wh, scores = raw.float().sigmoid().split((2, 2, raw.shape[-1] - 4), -1)
        return torch.cat(((xy * 2 - 0.5 + cells) * stride, (wh * 2).square() * anchors, scores), -1).flatten(1, 3)

    @classmethod
    def loss_hyps(cls, nc: int) -> frozenset[str]:
        of_classes = {"cls", "cls_pw"} if nc > 1 else set()
        return frozenset({"box", "obj", "obj_pw", "anchor_t", "fl_gamma"} | of_classes)

    def criterion(self, settings: LossSettings) -> AnchorLoss:
        return AnchorLoss(self, settings)

    def prepare(
        self, labels_wh: NDArray[np.floating], settings: LossSettings, rng: np.random.Generator | None
    ) -> dict[str, Tensor]:
        """Return the anchors that AutoAnchor chooses for the labels; none without `rng`."""
        if rng is None:
            return {}
        anchors_px, message = fit_anchors(self, labels_wh, settings.anchor_t, rng)
        log.info(message)
        return {"anchors": torch.from_numpy(anchors_px) / torch.tensor(self.strides)[:, None, None]}

    def nearest_row(self, level: int, wh: Tensor) -> Tensor:
        """Return the anchor with the smallest ratio of the worse side."""
        anchors = self.anchors[level].float() * self.strides[level]
        ratios = wh.clamp(min=SMALLEST_SIDE)[..., None, :].log() - anchors.log()
        return ratios.abs().amax(-1).argmin(-1)

    @property
    def priors(self) -> Tensor:
        """Copy of the anchors, float32 (nl, na, 2) in grid units on the CPU."""
        return self.anchors.detach().float().cpu().clone()


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
