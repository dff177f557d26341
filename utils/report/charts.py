"""Charts of a run: data in, one picture file out.

Every function here is pure but for the file that it writes, keeps no global state, and may be called from any thread:
figures are made by matplotlib's objects, without pyplot. They raise what goes wrong; whether a run outlives a failed
picture is for the caller to decide.

Legend: M objects of a dataset, C classes, C' classes drawn, K confidences, R recalls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from utils.evaluation.average_precision import Curves
from utils.files import atomic_write
from utils.report.palette import class_hex, font_families, printable
from utils.types import DatasetIndex, fitness

_TRAIN, _VAL = class_hex(9), class_hex(0)  # blue and red
_INK, _GRID = "#333333", "#dddddd"
_LABELLED_CLASSES = 20  # up to here, a legend has a line for each class
_NAMED_CLASSES = 130  # above it, names along an axis would run into each other: indices instead
_OVERLAID_BOXES = 1000

# Title, columns with their names in the legend; one panel each, after those of the losses.
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Precision", {"metrics/precision": "val"}),
    ("Recall", {"metrics/recall": "val"}),
    ("Learning rate", {"x/lr0": "biases", "x/lr1": "weights", "x/lr2": "norm weights"}),
    ("mAP 0.5", {"metrics/mAP_0.5": "val"}),
    ("mAP 0.5:0.95", {"metrics/mAP_0.5:0.95": "val"}),
    ("Images per second", {"images_per_s": "train"}),
)
_LOSS_COLUMN = re.compile(r"train/(.+)_loss")
_LONG_NAMES = {"obj": "objectness", "cls": "class"}  # of losses, for a title
_SERIES_COLOURS = {
    "train": _TRAIN,
    "val": _VAL,
    "biases": class_hex(12),
    "weights": _TRAIN,
    "norm weights": class_hex(6),
}
_RAW_SERIES = {"Learning rate"}  # set, not measured: nothing to smooth
_FROM_ZERO = ("Precision", "Recall", "mAP")


def _loss_panel(name: str) -> tuple[str, dict[str, str]]:
    """Title and columns of the panel of one loss."""
    title = f"{_LONG_NAMES.get(name, name)} loss"
    return title[0].upper() + title[1:], {f"train/{name}_loss": "train", f"val/{name}_loss": "val"}


def plot_results(results: pd.DataFrame, target: Path) -> None:
    """Losses, precision, recall, mAP, learning rates and speed over the epochs (`results.png`).

    Panels without a single finite value are left out, so that a run without validation has no empty ones.

    Args:
        results: columns of results.csv, of which only "epoch" must be there, one row an epoch.
        target: a .png file, replaced atomically.

    Raises:
        OSError: `target` cannot be written.
    """
    epochs = results["epoch"].to_numpy(float)
    panels = []
    losses = [match[1] for match in map(_LOSS_COLUMN.fullmatch, results.columns) if match]
    for title, columns in (*map(_loss_panel, losses), *_PANELS):
        series = {name: results[column].to_numpy(float) for column, name in columns.items() if column in results}
        series = {name: values for name, values in series.items() if np.isfinite(values).any()}
        if series:
            panels.append((title, series))
    figure = _figure(15, 4 * max(-(-len(panels) // 3), 1))
    if not panels:
        _empty(figure.add_subplot(), "no epoch has been completed yet")
    best = _best_epoch(results)
    for place, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // 3), min(len(panels), 3), place)
        for name, values in series.items():
            _curve_over_epochs(axes, epochs, values, name, smooth=title not in _RAW_SERIES)
        _dress(axes, title, "Epoch", "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if len(epochs) == 1:
            axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
            axes.set_xticks([epochs[0]])
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9)
        if title.startswith(_FROM_ZERO):
            axes.set_ylim(0, 1.08 * max(map(np.nanmax, series.values())) or 1)
        if best is not None and title.startswith("mAP"):
            value = series["val"][best]
            axes.plot(epochs[best], value, "*", color=_INK, markersize=11, zorder=5)
            axes.set_title(f"{title}: {value:.3f} at the best epoch, {epochs[best]:.0f}", fontsize=11)
    _save(figure, target)


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

    figure = _figure(15, 11.5)
    rows = figure.add_gridspec(2, 1, height_ratios=(1, 1.02))
    below = rows[1].subgridspec(1, 3)
    _class_histogram(figure.add_subplot(rows[0]), counts, index.names, images=len(index))
    overlay, centres, sizes = (figure.add_subplot(below[i]) for i in range(3))
    if len(boxes) == 0:
        for axes in (overlay, centres, sizes):
            _empty(axes, "no objects")
        _save(figure, target)
        return

    # Evenly spaced through the dataset, and moved to a common centre so that their sizes can be compared.
    chosen = np.unique(np.linspace(0, len(boxes) - 1, min(len(boxes), _OVERLAID_BOXES)).astype(int))
    half = (boxes[chosen, 2:] - boxes[chosen, :2]) / 2
    for (half_w, half_h), class_id in zip(half, index.classes[chosen], strict=True):
        x, y = [0.5 - half_w, 0.5 + half_w], [0.5 - half_h, 0.5 + half_h]
        axes_x, axes_y = [x[0], x[1], x[1], x[0], x[0]], [y[0], y[0], y[1], y[1], y[0]]
        overlay.plot(axes_x, axes_y, color=class_hex(int(class_id)), linewidth=0.6, alpha=0.6)
    _dress(overlay, f"Boxes, centred ({len(chosen):,} of {len(boxes):,})", "", "")
    overlay.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    overlay.spines[["top", "right"]].set_visible(True)

    _density(centres, (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2)
    _dress(centres, "Box centres", "x / image width", "y / image height")
    centres.invert_yaxis()
    _density(sizes, boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])
    _dress(sizes, "Box sizes", "width / image width", "height / image height")
    _save(figure, target)


def plot_validation(run: Path, curves: Curves, confusion: NDArray[np.int64], names: Sequence[str]) -> None:
    """All charts of a validation into its folder: `confusion_matrix.png` and `{P,R,F1,PR}_curve.png`.

    Args:
        run: the folder.
        curves: as `summarize` returns them.
        confusion, names: as in `plot_confusion_matrix`.

    Raises:
        OSError: a file cannot be written.
    """
    plot_confusion_matrix(confusion, names, run / "confusion_matrix.png")
    for letter, quantity, values in (
        ("P", "Precision", curves.precision),
        ("R", "Recall", curves.recall),
        ("F1", "F1", curves.f1),
    ):
        target = run / f"{letter}_curve.png"
        plot_confidence_curve(curves.confidence, values, curves.class_ids, names, quantity, target)
    plot_pr_curve(
        curves.recall_axis, curves.precision_at_recall, curves.ap50, curves.class_ids, names, run / "PR_curve.png"
    )


def plot_confusion_matrix(matrix: NDArray[Any], names: Sequence[str], target: Path) -> None:
    """Which class is taken for which (`confusion_matrix.png`), each column divided by its sum.

    Args:
        matrix: counts (C + 1, C + 1), rows predicted, columns true, the last of each the background.
        names: class names by index, C.
        target: a .png file, replaced atomically.

    Raises:
        OSError: `target` cannot be written.
    """
    count = len(names) + 1
    assert matrix.shape == (count, count), (matrix.shape, count)
    totals = matrix.sum(0, keepdims=True).astype(float)
    shares = np.divide(matrix, totals, out=np.full(matrix.shape, np.nan), where=totals > 0)
    labels = [*(_name(name, 28) for name in names), "background"]

    numbered = count <= 41  # with the share in each cell
    side = float(np.clip((0.36 if numbered else 0.24) * count + 3.5, 7, 26))
    figure = _figure(side * 1.1, side)
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_less(np.nan_to_num(shares), 0.005), cmap="Blues", vmin=0, vmax=1)
    size = float(np.clip(700 / count, 6, 11))
    if numbered:
        for row, column in zip(*np.nonzero(np.nan_to_num(shares) >= 0.005), strict=True):
            share = shares[row, column]
            ink = "white" if share > 0.5 else _INK
            axes.text(
                column,
                row,
                f"{share:.2f}",
                ha="center",
                va="center",
                color=ink,
                fontsize=float(np.clip(180 / count, 8, 14)),
            )
    _dress(axes, "Confusion matrix (share of each true class)", "True class", "Predicted class")
    if count <= _NAMED_CLASSES:
        axes.set_xticks(range(count), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(count), labels, fontsize=size)
        axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color="#eeeeee", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02)
    _save(figure, target)


def plot_confidence_curve(
    confidence: NDArray[np.float64],
    values: NDArray[np.float64],
    class_ids: NDArray[np.int64],
    names: Sequence[str],
    quantity: str,
    target: Path,
) -> None:
    """Precision, recall or F1 over the confidence (`P_curve.png`, `R_curve.png`, `F1_curve.png`).

    Args:
        confidence: (K,), ascending.
        values: (C', K).
        class_ids: (C',), the class of each row.
        names: class names by index.
        quantity: "Precision", "Recall" or "F1": the axis and the legend.
        target: a .png file, replaced atomically.

    Raises:
        OSError: `target` cannot be written.
    """
    figure = _figure(10, 6.5)
    axes = figure.add_subplot()
    if len(values) == 0:
        _empty(axes, "no labelled objects")
    else:
        mean = values.mean(0)
        best = int(mean.argmax())
        summary = f"all classes {mean[best]:.3f} at {confidence[best]:.3f}"
        tops = values.argmax(1)
        details = [f"{values[i, k]:.3f} at {confidence[k]:.3f}" for i, k in enumerate(tops)]
        _curves(axes, confidence, values, mean, class_ids, names, summary, details)
        axes.plot(confidence[best], mean[best], "o", color=_INK, markersize=6, zorder=5)
    _dress(axes, f"{quantity} over confidence", "Confidence", quantity)
    _save(figure, target)


def plot_pr_curve(
    recall: NDArray[np.float64],
    precision: NDArray[np.float64],
    ap50: NDArray[np.float64],
    class_ids: NDArray[np.int64],
    names: Sequence[str],
    target: Path,
) -> None:
    """Precision over recall at IoU 0.5 (`PR_curve.png`).

    Args:
        recall: (R,), ascending.
        precision: (C', R).
        ap50: (C',), the area that the legend tells.
        class_ids, names, target: as in `plot_confidence_curve`.
    """
    figure = _figure(10, 6.5)
    axes = figure.add_subplot()
    if len(precision) == 0:
        _empty(axes, "no labelled objects")
    else:
        summary = f"all classes {ap50.mean():.3f} mAP 0.5"
        _curves(axes, recall, precision, precision.mean(0), class_ids, names, summary, [f"{ap:.3f}" for ap in ap50])
    _dress(axes, "Precision over recall, IoU 0.5", "Recall", "Precision")
    _save(figure, target)


def _curves(
    axes: Axes,
    x: NDArray[np.float64],
    values: NDArray[np.float64],
    mean: NDArray[np.float64],
    class_ids: NDArray[np.int64],
    names: Sequence[str],
    summary: str,
    details: Sequence[str],
) -> None:
    """A thin line for each class, a bold one for their mean, and a legend beside the axes."""
    labelled = len(values) <= _LABELLED_CLASSES
    handles: list[Line2D] = []
    for row, class_id, detail in zip(values, class_ids, details, strict=True):
        colour = class_hex(int(class_id)) if labelled else "#9aa5b1"
        width, alpha = (1.2, 0.9) if labelled else (0.7, 0.6)
        (line,) = axes.plot(x, row, color=colour, linewidth=width, alpha=alpha)
        if labelled:
            line.set_label(f"{_name(names[class_id], 28)} {detail}")
            handles.append(line)
    if len(values) > 1:
        (bold,) = axes.plot(x, mean, color=_TRAIN, linewidth=3, label=summary)
        handles.insert(0, bold)
        if not labelled:
            handles.append(Line2D([], [], color="#9aa5b1", linewidth=0.7, label=f"each of {len(values)} classes"))
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)


def _class_histogram(axes: Axes, counts: NDArray[np.int64], names: Sequence[str], images: int) -> None:
    """Bars of objects a class, each named as long as the names can be told apart."""
    positions = np.arange(len(counts))
    axes.bar(positions, counts, color=[class_hex(i) for i in range(len(counts))], width=0.8)
    _dress(axes, f"Objects: {int(counts.sum()):,}   Classes: {len(counts):,}   Images: {images:,}", "", "Objects")
    if len(counts) <= _NAMED_CLASSES:
        level = len(counts) * min(max(map(len, names), default=0), 17) <= 140  # so many characters fit side by side
        axes.set_xticks(positions, [_name(name, 140 // len(counts) if level else 30) for name in names])
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
        axes.plot(x, y, ".", color=_TRAIN, alpha=0.5, markersize=5)
    else:
        bins = 50 if len(x) < 20_000 else 100
        axes.hist2d(x, y, bins=bins, range=((0, 1), (0, 1)), cmap="Blues", norm=LogNorm(vmin=0.5), zorder=2)


def _curve_over_epochs(
    axes: Axes, epochs: NDArray[np.float64], values: NDArray[np.float64], name: str, *, smooth: bool
) -> None:
    """A series as measured; above a handful of epochs that is a faint line under its smoothed self."""
    finite = np.isfinite(values)
    x, y, colour = epochs[finite], values[finite], _SERIES_COLOURS[name]
    if smooth and len(y) >= 8:
        axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.35)
        axes.plot(x, _smoothed(y), color=colour, linewidth=2, label=name)
    else:
        axes.plot(x, y, color=colour, linewidth=1.8, label=name, marker="o" if len(y) <= 30 else None, markersize=4)
        if name == "norm weights":  # the same as the weights' after warm-up
            axes.lines[-1].set_linestyle((0, (4, 4)))


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaussian average, narrower for short series; at the ends only over what is there."""
    sigma = float(np.clip(len(values) / 40, 1, 4))
    offsets = np.arange(-int(3 * sigma), int(3 * sigma) + 1)
    kernel = np.exp(-(offsets**2) / (2 * sigma**2))
    reach = len(offsets) // 2
    total = np.convolve(values, kernel)[reach : reach + len(values)]
    return total / np.convolve(np.ones_like(values), kernel)[reach : reach + len(values)]


def _best_epoch(table: pd.DataFrame) -> int | None:
    """Row of the highest fitness; None where nothing was validated."""
    if not {"metrics/mAP_0.5", "metrics/mAP_0.5:0.95"} <= set(table.columns):
        return None
    values = fitness(table["metrics/mAP_0.5"], table["metrics/mAP_0.5:0.95"]).to_numpy(float)
    # Of equal epochs the later, as EarlyStopping has it.
    return len(values) - 1 - int(np.nanargmax(values[::-1])) if np.isfinite(values).any() else None


def _name(text: str, limit: int) -> str:
    """A class name that matplotlib takes literally: no mathematics between dollars, not hidden by an underscore."""
    shown = printable(text, limit).replace("$", r"\$")
    return f"\u200a{shown}" if shown.startswith("_") else shown


def _figure(width: float, height: float) -> Figure:
    """Empty figure, in inches at 100 dots an inch."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    """The look that all panels share."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _empty(axes: Axes, why: str) -> None:
    """Say why a panel shows nothing."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=_INK, fontsize=12)
    axes.set(xticks=[], yticks=[])


def _save(figure: Figure, target: Path) -> None:
    """Write the figure, whole or not at all."""
    for text in figure.findobj(lambda artist: hasattr(artist, "set_fontfamily")):
        text.set_fontfamily(list(font_families()))  # type: ignore[attr-defined]
    options = {"quality": 92} if target.suffix.lower() in {".jpg", ".jpeg"} else {}
    with atomic_write(target) as file:
        figure.savefig(file, format=target.suffix[1:].lower(), pil_kwargs=options)
