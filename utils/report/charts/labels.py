"""What a dataset's labels look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from utils.report.charts.figure import BLUE, NAMED_CLASSES, class_label, new_figure, save, say_why_empty, style
from utils.report.palette import class_hex
from utils.types import DatasetIndex

_OVERLAID_BOXES = 1000


def plot_labels(index: DatasetIndex, target: Path) -> None:
    """What a dataset's labels look like: classes, places, sizes, shapes (`labels.jpg`).

    Args:
        index: any split; an index without objects gives a picture that says so.
        target: a .jpg file, replaced atomically.

    Raises:
        OSError: `target` cannot be written.
    """
    objects = np.diff(index.box_offsets)
    scale = np.repeat(index.sizes_hw[:, [1, 0, 1, 0]], objects, axis=0)
    boxes = np.clip(index.boxes_xyxy / np.maximum(scale, 1), 0, 1)
    counts = np.bincount(index.classes, minlength=len(index.names))

    figure = new_figure(15, 11.5)
    rows = figure.add_gridspec(2, 1, height_ratios=(1, 1.02))
    below = rows[1].subgridspec(1, 3)
    _class_histogram(figure.add_subplot(rows[0]), counts, index.names, images=len(index))
    overlay, centres, sizes = (figure.add_subplot(below[i]) for i in range(3))
    if len(boxes) == 0:
        for axes in (overlay, centres, sizes):
            say_why_empty(axes, "no objects")
        save(figure, target)
        return

    # Evenly spaced through the dataset, and moved to a common centre so that their sizes can be compared.
    chosen = np.unique(np.linspace(0, len(boxes) - 1, min(len(boxes), _OVERLAID_BOXES)).astype(int))
    half = (boxes[chosen, 2:] - boxes[chosen, :2]) / 2
    for (half_w, half_h), class_id in zip(half, index.classes[chosen], strict=True):
        x, y = [0.5 - half_w, 0.5 + half_w], [0.5 - half_h, 0.5 + half_h]
        axes_x, axes_y = [x[0], x[1], x[1], x[0], x[0]], [y[0], y[0], y[1], y[1], y[0]]
        overlay.plot(axes_x, axes_y, color=class_hex(int(class_id)), linewidth=0.6, alpha=0.6)
    style(overlay, f"Boxes, centred ({len(chosen):,} of {len(boxes):,})", "", "")
    overlay.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    overlay.spines[["top", "right"]].set_visible(True)

    _density(centres, (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2)
    style(centres, "Box centres", "x / image width", "y / image height")
    centres.invert_yaxis()
    _density(sizes, boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])
    style(sizes, "Box sizes", "width / image width", "height / image height")
    save(figure, target)


def _class_histogram(axes: Axes, counts: NDArray[np.int64], names: Sequence[str], images: int) -> None:
    """Bars of objects a class, with their names while these are legible."""
    positions = np.arange(len(counts))
    axes.bar(positions, counts, color=[class_hex(i) for i in range(len(counts))], width=0.8)
    style(axes, f"Objects: {int(counts.sum()):,}   Classes: {len(counts):,}   Images: {images:,}", "", "Objects")
    if len(counts) <= NAMED_CLASSES:
        level = len(counts) * min(max(map(len, names), default=0), 17) <= 140  # so many characters fit side by side
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


def _density(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Points of the unit square: each as a dot where they are few, else counted in cells on a logarithmic scale."""
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    if len(x) <= 500:
        axes.plot(x, y, ".", color=BLUE, alpha=0.5, markersize=5)
    else:
        bins = 50 if len(x) < 20_000 else 100
        axes.hist2d(x, y, bins=bins, range=((0, 1), (0, 1)), cmap="Blues", norm=LogNorm(vmin=0.5), zorder=2)
