"""Drift checks of `--check-data`: permutation tests of val and test against train (classes, boxes, counts).

Images are the unit, as objects of one image are correlated. A permutation test deals all images to the two splits at
random; a family of fractions differs if few permutations have as large a maximum difference (Westfall and Young 1993).
P-values of all families and splits are corrected (Holm 1979), and small effects are dropped.

Legend: N images, K fractions of a family, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.checks.results import ChangedFraction, DatasetCheck, Drift, SplitData
from tessera.data.source.index import class_names
from tessera.utils.seeding import sample_rng
from tessera.utils.text import first_of, shown

ROUNDS = 999  # permutations
LEVEL = 0.05  # family-wise error rate
EFFECT = 0.15  # minimum effect size, Cohen's h (Cohen 1988 calls 0.2 small)
_LEAST = 20  # minimum number of images of a split
_SEEN = 5  # minimum number of images with a non-zero fraction
_SIDES = (0.0, 0.04, 0.08, 0.16, 0.32, 0.64)  # root of box area over image area
_SIDE_NAMES = ("below 4 %", "4 to 8 %", "8 to 16 %", "16 to 32 %", "32 to 64 %", "64 % and more")
_COUNTS = (0, 1, 2, 5, 10, 20)
_COUNT_NAMES = ("none", "1", "2 to 4", "5 to 9", "10 to 19", "20 and more")
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
CLASSES, SIZES, POSITIONS, OBJECT_COUNTS = "classes", "box sizes", "box positions", "object counts"
FAMILIES = {
    CLASSES: "images with an object of the class",
    SIZES: "boxes of an image by side, as a fraction of the image's",
    POSITIONS: "boxes of an image by the position of their centre",
    OBJECT_COUNTS: "images by number of objects",
}


class Fractions(NamedTuple):
    """Fractions of a family, 0 … 1, for each image, as a sparse matrix (N, K) of E entries."""

    names: tuple[str, ...]  # of the K fractions
    images: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]
    has: NDArray[np.bool_]  # bool (N,), images that count: those with an object, or those that label all classes


def check_drift(check: DatasetCheck, parts: Sequence[SplitData]) -> None:
    """Report families of fractions in which a split differs from train."""
    found = [
        _compared(family, ("train", other.split), first, second)
        for train in parts
        for other in parts
        if train.split == "train" and other is not train
        for family, (first, second) in _families(train, other).items()
        if min(first.has.sum(), second.has.sum()) >= _LEAST
    ]
    check.drifts += _corrected(found)
    for drift in check.drifts:
        if drift.changed:
            (train, other), family = drift.splits, drift.family
            changed = [
                f"{one.name} {100 * one.fractions[0]:.0f} % and {100 * one.fractions[1]:.0f} %" for one in drift.changed
            ]
            check.notes.append(
                f"{other}: {family} differ significantly from {train} (p {drift.p:.3f}): {first_of(changed, 3)} "
                f"({FAMILIES[family]}, in {train} and {other})"
            )


def _compared(family: str, splits: tuple[str, str], first: Fractions, second: Fractions) -> Drift:
    """Compare a family between two splits; the p-values are not yet corrected."""
    n, m = int(first.has.sum()), int(second.has.sum())
    means = np.stack([_sums(first, first.has) / n, _sums(second, second.has) / m])
    joined = _joined(first, second)
    inside = np.zeros(len(joined.has), np.bool_)
    inside[len(first.has) :] = True
    places = np.flatnonzero(joined.has)
    seen = np.bincount(joined.columns, minlength=len(joined.names)) >= _SEEN
    scale = _scales(joined, n, m)
    rng = sample_rng(0, 0, 0, "bootstrap")
    total = _sums(joined, joined.has)

    def deviation(selected: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.where(seen, np.abs(_sums(joined, selected) - total * (m / (n + m))) / scale, 0)

    own = deviation(inside & joined.has)
    largest = np.zeros(ROUNDS)
    for number in range(ROUNDS):
        selected = np.zeros(len(joined.has), np.bool_)
        selected[places[rng.permutation(n + m)[:m]]] = True
        largest[number] = deviation(selected).max(initial=0)
    chance = (1 + (largest[:, None] >= own - 1e-9).sum(0)) / (1 + ROUNDS)
    size = np.abs(np.diff(2 * np.arcsin(np.sqrt(means.clip(0, 1))), axis=0))[0]
    changed = [
        ChangedFraction(joined.names[k], (float(means[0, k]), float(means[1, k])), float(chance[k]))
        for k in np.argsort(chance - 1e-3 * size, kind="stable").tolist()
        if seen[k] and size[k] >= EFFECT and chance[k] <= LEVEL
    ]
    differences = np.abs(means[1] - means[0])
    distance = differences.max(initial=0) if family == CLASSES else differences.sum() / 2
    return Drift(family, splits, (n, m), float(chance.min(initial=1)), float(distance), tuple(changed))


def _corrected(drifts: Sequence[Drift]) -> list[Drift]:
    """Correct the p-values for the number of comparisons (Holm 1979), and drop what is no longer significant."""
    order = np.argsort([drift.p for drift in drifts], kind="stable").tolist()
    corrected = dict[int, Drift]()
    least = 0.0
    for rank, place in enumerate(order):
        drift, factor = drifts[place], len(drifts) - rank
        least = max(least, min(1.0, drift.p * factor))
        certain = [replace(one, p=max(least, one.p * factor)) for one in drift.changed if one.p * factor <= LEVEL]
        corrected[place] = replace(drift, p=least, changed=tuple(certain) if least <= LEVEL else ())
    return [corrected[place] for place in range(len(drifts))]


def _families(train: SplitData, other: SplitData) -> dict[str, tuple[Fractions, Fractions]]:
    families = {CLASSES: _classes, SIZES: _sizes, POSITIONS: _positions, OBJECT_COUNTS: _object_counts}
    if len(class_names(train.spec, train.single_cls)) == 1:
        del families[CLASSES]  # object counts cover a single class
    return {family: (make(train), make(other)) for family, make in families.items()}


def _classes(part: SplitData) -> Fractions:
    names = class_names(part.spec, part.single_cls)
    pairs = np.unique(np.stack((_images(part), part.scanned.classes.astype(np.int64)), 1), axis=0)
    complete = _labels_all(part)
    pairs = pairs[(pairs[:, 1] < len(names)) & complete[pairs[:, 0]]]
    return Fractions(tuple(map(shown, names)), pairs[:, 0], pairs[:, 1], np.ones(len(pairs)), complete)


def _sizes(part: SplitData) -> Fractions:
    boxes, images = part.scanned.boxes_xyxy.astype(np.float64), _images(part)
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0) / part.scanned.sizes_hw[images][:, ::-1]
    return _of_boxes(part, np.searchsorted(_SIDES, np.sqrt(sides.prod(1)), "right") - 1, _SIDE_NAMES)


def _positions(part: SplitData) -> Fractions:
    boxes, images = part.scanned.boxes_xyxy.astype(np.float64), _images(part)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 / part.scanned.sizes_hw[images][:, ::-1]
    column, row = np.clip((3 * centres).astype(np.int64), 0, 2).T
    return _of_boxes(part, 3 * row + column, tuple(f"{row} {column}" for row in _ROWS for column in _COLUMNS))


def _object_counts(part: SplitData) -> Fractions:
    complete = _labels_all(part)
    images = np.flatnonzero(complete)
    columns = np.searchsorted(_COUNTS, part.scanned.counts[images], "right") - 1
    return Fractions(_COUNT_NAMES, images, columns, np.ones(len(images)), complete)


def _labels_all(part: SplitData) -> NDArray[np.bool_]:
    """Return which images label all classes, (N,)."""
    sets = part.scanned.set_of_image
    return sets < 0 if len(sets) else np.ones(len(part.scanned.counts), np.bool_)


def _of_boxes(part: SplitData, columns: NDArray[np.int64], names: tuple[str, ...]) -> Fractions:
    """Return the fraction of each image's boxes in each column."""
    images, counts = _images(part), part.scanned.counts
    return Fractions(names, images, columns, 1 / counts[images], counts > 0)


def _images(part: SplitData) -> NDArray[np.int64]:
    """Return the image of each object among the usable images."""
    return np.repeat(np.arange(len(part.scanned.counts), dtype=np.int64), part.scanned.counts)


def _sums(fractions: Fractions, selected: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the sum of each fraction over the images of `selected`, (K,)."""
    values = fractions.values * selected[fractions.images]
    return np.bincount(fractions.columns, weights=values, minlength=len(fractions.names)).astype(np.float64)


def _joined(first: Fractions, second: Fractions) -> Fractions:
    second = second._replace(images=second.images + len(first.has))
    joined: Any = map(np.concatenate, zip(first[1:], second[1:], strict=True))
    return Fractions(first.names, *joined)


def _scales(fractions: Fractions, n: int, m: int) -> NDArray[np.float64]:
    """Return the standard deviation of each sum over m of n + m images, drawn without replacement; inf instead of 0."""
    total = n + m
    cell = fractions.images * len(fractions.names) + fractions.columns
    keys, of = np.unique(cell, return_inverse=True)
    values = np.bincount(of.reshape(-1), weights=fractions.values, minlength=len(keys))
    squares = np.bincount(keys % len(fractions.names), weights=values**2, minlength=len(fractions.names))
    means = _sums(fractions, fractions.has) / total
    variance = (squares - total * means**2) / (total - 1) * (m * n / total)
    return np.where(variance > 1e-9, np.sqrt(np.maximum(variance, 0)), np.inf)
