"""Chart of a dataset's labels (`labels.jpg`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tessera.utils.report.charts.figure import BLUE, NAMED_CLASSES, class_label, explain_empty, new_figure, save, style
from tessera.utils.report.palette import class_hex, class_text
from tessera.utils.types import DatasetIndex

_OVERLAID_BOXES = 1000
_AT_ONCE = 1 << 16  # objects


def plot_labels(index: DatasetIndex, target: Path) -> None:
    """Plot classes, positions, sizes and shapes of the labels of a split."""
    total = len(index.classes)
    counts = np.zeros(len(index.names), np.int64)
    bins = 50 if total < 20_000 else 100
    centres_in, sizes_in = np.zeros((bins, bins), np.int64), np.zeros((bins, bins), np.int64)
    for start in range(0, total, _AT_ONCE):
        some = np.arange(start, min(start + _AT_ONCE, total))
        counts += np.bincount(index.classes[some], minlength=len(counts))
        middle, size = _places(index, some)
        centres_in += _cells(middle, bins)
        sizes_in += _cells(size, bins)

    figure = new_figure(15, 11.5)
    rows = figure.add_gridspec(2, 1, height_ratios=(1, 1.02))
    below = rows[1].subgridspec(1, 3)
    _class_histogram(figure.add_subplot(rows[0]), counts, index.names, images=len(index))
    overlay, centres, sizes = (figure.add_subplot(below[i]) for i in range(3))
    if total == 0:
        for axes in (overlay, centres, sizes):
            explain_empty(axes, "no objects")
        save(figure, target)
        return

    # Evenly spaced through the dataset, and moved to a common centre so that their sizes can be compared.
    chosen = np.unique(np.linspace(0, total - 1, min(total, _OVERLAID_BOXES)).astype(int))
    middle, size = _places(index, chosen)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) / 2
    colours = [class_hex(int(class_id)) for class_id in index.classes[chosen]]
    outlines = 0.5 + size[:, None] * corners
    overlay.add_collection(
        PolyCollection(list(outlines), facecolors="none", edgecolors=colours, linewidths=0.6, alpha=0.6)
    )
    style(overlay, f"Boxes, centred ({len(chosen):,} of {total:,})", "", "")
    overlay.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    overlay.spines[["top", "right"]].set_visible(True)

    _density(centres, centres_in)
    style(centres, "Box centres", "x / image width", "y / image height")
    centres.invert_yaxis()
    _density(sizes, sizes_in)
    style(sizes, "Box sizes", "width / image width", "height / image height")
    save(figure, target)


def _places(index: DatasetIndex, objects: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return centres and sizes of some objects (n,), each (n, 2) as fractions of the image."""
    images = np.searchsorted(index.box_offsets, objects, side="right") - 1
    scale = np.maximum(index.sizes_hw[images][:, [1, 0, 1, 0]], 1)
    boxes = np.clip(index.boxes_xyxy[objects] / scale, 0, 1)
    return (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]


def _cells(points: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """Count the points (n, 2) of the unit square in each cell, (bins, bins), rows by y."""
    column, row = np.minimum((points * bins).astype(np.int64), bins - 1).T
    return np.bincount(row * bins + column, minlength=bins * bins).reshape(bins, bins)


def _class_histogram(axes: Axes, counts: NDArray[np.int64], names: Sequence[str], images: int) -> None:
    """Draw bars of objects per class, with class names while they are legible."""
    names = [class_text(number, name) for number, name in enumerate(names)]
    positions = np.arange(len(counts))
    if len(counts) <= NAMED_CLASSES:
        axes.bar(positions, counts, color=[class_hex(i) for i in range(len(counts))], width=0.8)
    else:
        axes.stairs(counts, np.arange(len(counts) + 1) - 0.5, fill=True, color=BLUE)
    style(axes, f"Objects: {int(counts.sum()):,}   Classes: {len(counts):,}   Images: {images:,}", "", "Objects")
    if len(counts) <= NAMED_CLASSES:
        level = len(counts) * min(max(map(len, names), default=0), 17) <= 140  # characters that fit side by side
        axes.set_xticks(positions, [class_label(name, 140 // len(counts) if level else 30) for name in names])
        size = float(np.clip(700 / max(len(counts), 1), 6, 11))
        axes.tick_params(axis="x", labelsize=size, rotation=0 if level else 90, length=0)
    else:
        axes.set_xlabel("Class index")
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False, axis="x")
    if counts.max(initial=0) > 50 * max(int(np.median(counts)), 1):  # a few classes would leave the others invisible
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylabel("Objects (logarithmic)")
    if len(counts) <= 20:
        for x, count in zip(positions, counts, strict=True):
            axes.annotate(f"{count:,}", (x, count), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=9)
        axes.margins(y=0.08)
    axes.set_ylim(bottom=0, top=None if counts.any() else 1)


def _density(axes: Axes, cells: NDArray[np.int64]) -> None:
    """Draw the number of points in each cell on a logarithmic scale."""
    edges = np.linspace(0, 1, len(cells) + 1)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.pcolormesh(edges, edges, cells, cmap="Blues", norm=LogNorm(vmin=0.5), zorder=2)
