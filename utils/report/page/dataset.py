"""The dataset at a glance: pictures, objects, classes and the sizes of boxes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from tessera.utils.report.page.breakdown import sides_as_seen
from tessera.utils.report.page.facts import Facts, readable
from tessera.utils.report.page.svg import line_chart
from tessera.utils.types import DatasetIndex

_SIDES = 2.0 ** np.arange(1, 11.5, 0.5)  # pixels, edges of the histogram


class Split(NamedTuple):
    """Figures of a split."""

    name: str
    images: int
    objects: int
    empty: int
    ignored: int
    most: int
    sizes: str


class Glance(NamedTuple):
    """What the page shows of a dataset."""

    splits: list[Split]
    left_out: list[str]
    sizes: Markup | None


def splits_of(facts: Facts) -> dict[str, DatasetIndex]:
    """The splits that are known, by name."""
    trained_on = facts.origin.trained_on
    own = {facts.index.split: facts.index}
    return own if trained_on is None else {trained_on.split: trained_on, **own}


def pictures_by_class(index: DatasetIndex) -> NDArray[np.int64]:
    """In how many pictures each class has an object: (C,)."""
    nc = len(index.names)
    images = np.repeat(np.arange(len(index), dtype=np.int64), np.diff(index.box_offsets))
    return np.bincount(np.unique(images * nc + index.classes) % nc, minlength=nc)


def glance(facts: Facts) -> Glance:
    """Both splits of a training, or the one that was measured."""
    splits = splits_of(facts)
    shares = {name: _histogram(index, facts.origin.imgsz) for name, index in splits.items() if len(index.classes)}
    chart = None
    if shares:
        title = f"Boxes by their side in a picture of {facts.origin.imgsz} pixels, as a share of each split"
        label = f"side in pixels, in a picture of {facts.origin.imgsz}"
        there = np.flatnonzero(np.sum(list(shares.values()), 0))
        own = slice(max(int(there[0]) - 1, 0), int(there[-1]) + 2)
        shown = {name: values[own] for name, values in shares.items()}
        chart = line_chart(title, _SIDES[:-1][own], shown, x_label=label, in_powers=True)
    left_out = [readable(index.left_out, 1000) for index in splits.values() if index.left_out]
    return Glance([_split(name, index) for name, index in splits.items()], left_out, chart)


def _split(name: str, index: DatasetIndex) -> Split:
    counts = np.diff(index.box_offsets)
    sizes = index.sizes_hw[:, ::-1]
    width, height = np.median(sizes, 0) if len(sizes) else (0, 0)
    return Split(
        name,
        len(index),
        len(index.classes),
        int((counts == 0).sum()),
        len(index.ignored_classes),
        int(counts.max(initial=0)),
        f"{width:.0f} × {height:.0f}",
    )


def _histogram(index: DatasetIndex, imgsz: int) -> NDArray[np.float64]:
    images = np.repeat(np.arange(len(index), dtype=np.int64), np.diff(index.box_offsets))
    sides = sides_as_seen(index, images, index.boxes_xyxy, imgsz).clip(_SIDES[0], _SIDES[-1])
    return np.histogram(sides, _SIDES)[0] / len(sides)
