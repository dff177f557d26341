"""Charts of a run: labels.jpg, results.png, confusion matrix, and curves over confidence and recall.

Each function writes one file `target`, atomically. It has no global state and may be called from any thread: figures
are matplotlib objects, without pyplot. Errors are raised; the caller decides whether a run survives. With many classes
a chart shows a part of them, and says so.

Legend: C classes, C' classes that have objects, K confidences, R recalls, G groups of classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tessera.analysis.error_counts import ConfusionMatrix
from tessera.deploy.inference.drawing import class_hex, class_text, drawable, font_families
from tessera.utils.engine.state import INITIAL
from tessera.utils.evaluation.average_precision import RECALLS
from tessera.utils.evaluation.curves import Curves
from tessera.utils.evaluation.matching import CONFIDENCES
from tessera.utils.files import atomic_write
from tessera.utils.report.results_csv import read_rows
from tessera.utils.types import DatasetIndex

BLUE, RED = class_hex(9), class_hex(0)
INK, GRID = "#333333", "#dddddd"
NAMED_CLASSES = 130  # above it, names along an axis would run into each other: indices instead
_OVERLAID_BOXES = 1000
_AT_ONCE = 1 << 16  # objects
_LABELLED_CLASSES = 20  # up to here, a legend has a line for each class
_POINTS = 201  # of a line, where there are more classes
_NUMBERED = 41  # rows of a matrix with numbers in the cells
_FAINT = "#9aa5b1"
_LOSS = re.compile(r"train/(.+)_loss")
METRIC_PANELS = {
    "mAP": {"metrics/mAP_0.5:0.95": "mAP50-95", "metrics/mAP_0.5": "mAP50"},
    "Precision and recall": {"metrics/precision": "precision", "metrics/recall": "recall"},
}
RATE_PANELS = {"Learning rate": {"x/lr1": "weights", "x/lr2": "norm weights"}}
TIME_PANELS = {
    "Images per second": {"images_per_s": "training"},
    "Fraction of the time spent waiting for images": {"time/data_wait": "waiting"},
}


def class_label(text: str, limit: int) -> str:
    """Return a class name that matplotlib takes literally: no mathtext between dollars, not hidden by an underscore."""
    shown = drawable(text, limit).replace("$", r"\$")
    return f"\u200a{shown}" if shown.startswith("_") else shown


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches at 100 dpi."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes, title: str, x: str, y: str) -> None:
    """Apply the style of all panels."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def explain_empty(axes: Axes, why: str) -> None:
    """Write in a panel why it is empty."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=INK, fontsize=12)
    axes.set(xticks=[], yticks=[])


def save(figure: Figure, target: Path) -> None:
    """Write the figure atomically."""
    for text in figure.findobj(lambda artist: hasattr(artist, "set_fontfamily")):
        text.set_fontfamily(list(font_families()))  # type: ignore[attr-defined]
    options = {"quality": 92} if target.suffix.lower() in {".jpg", ".jpeg"} else {}
    with atomic_write(target) as file:
        figure.savefig(file, format=target.suffix[1:].lower(), pil_kwargs=options)


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


def read_results(path: Path) -> pd.DataFrame:
    """Read results.csv of any head: float columns, integer "epoch", without a last line that was cut short.

    Raises UserError if the file is not such a table.
    """
    columns, rows = read_rows(path)
    table = pd.DataFrame(rows, columns=list(columns), dtype=object).astype(float)
    return table.astype({"epoch": int})


def loss_names(results: pd.DataFrame) -> list[str]:
    """Return the names of the losses in results.csv."""
    return [match[1] for match in map(_LOSS.fullmatch, results.columns) if match]


def training_series(results: pd.DataFrame) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return the series of results.png and the page by title and name, without empty ones; only "epoch" is required."""
    names = loss_names(results)
    panels = {f"Loss: {name}": {f"train/{name}_loss": "train", f"val/{name}_loss": "val"} for name in names}
    found = {}
    for title, columns in {**METRIC_PANELS, **panels, **RATE_PANELS, **TIME_PANELS}.items():
        series = {name: results[column].to_numpy(float) for column, name in columns.items() if column in results}
        if series := {name: values for name, values in series.items() if np.isfinite(values).any()}:
            found[title] = series
    return found


def plot_results(results: pd.DataFrame, target: Path, best: int | None) -> None:
    """Plot losses, precision, recall, mAP, learning rates and speed of results.csv, without panels that lack values.

    `best` is `EarlyStopping.best_epoch`, which the table alone does not tell.
    """
    epochs, panels = results["epoch"].to_numpy(float), training_series(results)
    figure = new_figure(15, 4 * max(-(-len(panels) // 3), 1))
    if not panels:
        explain_empty(figure.add_subplot(), "no epoch has been completed yet")
    for place, (title, series) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(-(-len(panels) // 3), min(len(panels), 3), place)
        for colour, (name, values) in zip((BLUE, RED), series.items(), strict=False):
            _curve_over_epochs(axes, epochs, values, name, colour, smooth=title != "Learning rate")  # that is set
        style(axes, title, "Epoch", "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9)
        if title in ("mAP", "Precision and recall"):
            axes.set_ylim(0, 1.08 * max(map(np.nanmax, series.values())) or 1)
        if title == "mAP":
            _mark_best(axes, epochs, series["mAP50-95"], best)
    save(figure, target)


def _curve_over_epochs(
    axes: Axes, epochs: NDArray[np.float64], values: NDArray[np.float64], name: str, colour: str, *, smooth: bool
) -> None:
    """Draw a series; with many epochs as a faint line below its moving average."""
    finite = np.isfinite(values)
    x, y = epochs[finite], values[finite]
    if smooth and len(y) >= 8:
        axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.35)
        smoothed = pd.Series(y).rolling(1 + len(y) // 8, center=True, min_periods=1).mean()
        axes.plot(x, smoothed, color=colour, linewidth=2, label=name)
    else:
        axes.plot(x, y, color=colour, linewidth=1.8, label=name, marker="o" if len(y) <= 30 else None, markersize=4)
        if name == "norm weights":  # the same as the weights' after warm-up
            axes.lines[-1].set_linestyle((0, (4, 4)))


def _mark_best(axes: Axes, epochs: NDArray[np.float64], maps: NDArray[np.float64], best: int | None) -> None:
    """Mark and title the best epoch."""
    if best == INITIAL:
        axes.set_title("No epoch is better than the initial weights", fontsize=11)
    row = epochs == best
    if row.any():
        axes.plot(epochs[row], maps[row], "*", color=INK, markersize=11, zorder=5)
        axes.set_title(f"mAP50-95 {maps[row][0]:.3f} at the best epoch, {best}", fontsize=11)


def most_confused(confusion: ConfusionMatrix, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the most confused classes, ascending, and their matrix.

    Returns:
        (c,), all if there are at most `most`; and counts (G, G) of these, of all others together if any, and of
        background.
    """
    chosen = np.sort(confusion.confusions().argsort(kind="stable")[-most:])
    group_of = np.full(confusion.nc + 1, len(chosen))
    group_of[chosen], group_of[-1] = range(len(chosen)), len(chosen) + (len(chosen) < confusion.nc)
    return chosen, confusion.grouped(group_of)


def plot_validation(
    run: Path, curves: Curves, confusion: ConfusionMatrix, confidence: float, names: Sequence[str]
) -> None:
    """Write `confusion_matrix.png`, at a confidence, and `{P,R,F1,PR}_curve.png` into the run directory."""
    plot_confusion_matrix(confusion, confidence, names, run / "confusion_matrix.png")
    plot_confidence_curve(curves, curves.precision, names, "Precision", run / "P_curve.png")
    plot_confidence_curve(curves, curves.recall, names, "Recall", run / "R_curve.png")
    plot_confidence_curve(curves, curves.f1, names, "F1", run / "F1_curve.png")
    plot_pr_curve(curves, names, run / "PR_curve.png")


def plot_confusion_matrix(confusion: ConfusionMatrix, confidence: float, names: Sequence[str], target: Path) -> None:
    """Plot the confusion matrix at a confidence threshold, each column divided by its sum: the diagonal is recall."""
    assert confusion.nc == len(names), (confusion.nc, len(names))
    names = [class_text(number, name) for number, name in enumerate(names)]
    title = f"Confusion matrix at confidence {confidence:.3f} and IoU 0.5 (by true class: the diagonal is recall)"
    most = len(names) if len(names) <= NAMED_CLASSES else _NUMBERED - 2
    chosen, matrix = most_confused(confusion, most)
    labels = [*(names[i] for i in chosen), "background"]
    if len(chosen) < len(names):
        title = f"{title}\n{most} most confused of {len(names):,} classes, the others together"
        labels.insert(-1, f"other {len(names) - most:,}")
    count = len(labels)
    totals = matrix.sum(0, keepdims=True).astype(float)
    shares = np.divide(matrix, totals, out=np.full(matrix.shape, np.nan), where=totals > 0)
    labels = [class_label(label, 28) for label in labels]

    numbered = count <= _NUMBERED
    side = float(np.clip((0.36 if numbered else 0.24) * count + 3.5, 7, 26))
    figure = new_figure(side * 1.1, side)
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_less(np.nan_to_num(shares), 0.005), cmap="Blues", vmin=0, vmax=1)
    size = float(np.clip(700 / count, 6, 11))
    if numbered:
        font = float(np.clip(180 / count, 8, 14))
        for row, column in zip(*np.nonzero(np.nan_to_num(shares) >= 0.005), strict=True):
            share = shares[row, column]
            ink = "white" if share > 0.5 else INK
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=ink, fontsize=font)
    style(axes, title, "True class", "Predicted class")
    axes.set_xticks(range(count), labels, rotation=90, fontsize=size)
    axes.set_yticks(range(count), labels, fontsize=size)
    axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color="#eeeeee", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02)
    save(figure, target)


def plot_confidence_curve(
    curves: Curves, values: NDArray[np.float64], names: Sequence[str], quantity: str, target: Path
) -> None:
    """Plot precision, recall or F1, (C', K), over the confidence.

    The mark is the confidence with the best mean F1. The legend has each class's own, as of `--conf-thres
    auto`.
    """
    details, best = [], curves.best
    if len(values):
        own = zip(values[:_LABELLED_CLASSES], curves.class_best, strict=False)
        details = [f"{row[k]:.3f} at {CONFIDENCES[k]:.3f}" for row, k in own]
        details.append(f"{values[:, best].mean():.3f} at {CONFIDENCES[best]:.3f}")
    figure = new_figure(10, 6.5)
    axes = figure.add_subplot()
    _curves(axes, curves, names, CONFIDENCES, values, details)
    if len(values):
        axes.plot(CONFIDENCES[best], values[:, best].mean(), "o", color=INK, markersize=6, zorder=5)
    style(axes, f"{quantity} over confidence", "Confidence", quantity)
    save(figure, target)


def plot_pr_curve(curves: Curves, names: Sequence[str], target: Path) -> None:
    """Plot precision over recall at IoU 0.5, with the area under each curve in the legend."""
    details = [f"{ap:.3f}" for ap in curves.ap50[:_LABELLED_CLASSES]]
    details += [f"{curves.ap50.mean():.3f} mAP 0.5"] if details else []
    figure = new_figure(10, 6.5)
    axes = figure.add_subplot()
    _curves(axes, curves, names, RECALLS, curves.precision_at_recall, details)
    style(axes, "Precision over recall, IoU 0.5", "Recall", "Precision")
    save(figure, target)


def _curves(
    axes: Axes,
    curves: Curves,
    names: Sequence[str],
    x: NDArray[np.float64],
    values: NDArray[np.float64],
    details: Sequence[str],
) -> None:
    """Draw a thin line per class, a bold one for the mean, and a legend beside the axes.

    `details` are legend texts of the first classes, and of the mean.
    """
    count = len(values)
    if count == 0:
        explain_empty(axes, "no labelled objects")
        return
    handles: list[Artist] = []
    if count <= _LABELLED_CLASSES:
        for row, class_id, detail in zip(values, curves.class_ids.tolist(), details, strict=False):
            label = f"{class_label(class_text(class_id, names[class_id]), 28)} {detail}"
            handles += axes.plot(x, row, color=class_hex(class_id), linewidth=1.2, alpha=0.9, label=label)
    else:
        keep = np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(int)
        lines = list(np.stack(np.broadcast_arrays(x[keep], values[:, keep]), axis=-1))
        label = f"each of {count:,} classes"
        faint = LineCollection(lines, colors=_FAINT, linewidths=0.7, alpha=0.6, label=label)
        handles.append(axes.add_collection(faint))
    if count > 1:
        summary = f"all classes {details[-1]}"
        handles[:0] = axes.plot(x, values.mean(0), color=BLUE, linewidth=3, label=summary)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
