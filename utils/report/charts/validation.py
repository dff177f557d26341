"""Charts of a validation: confusion matrix, and curves over confidence and recall.

With many classes a chart shows a part of them, and says so.

Legend: C classes, C' classes that have objects, K confidences, R recalls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from numpy.typing import NDArray

from tessera.analysis.report.page_data import most_confused
from tessera.utils.evaluation.average_precision import RECALLS
from tessera.utils.evaluation.curves import Curves
from tessera.utils.evaluation.error_counts import ConfusionMatrix
from tessera.utils.evaluation.matching import CONFIDENCES
from tessera.utils.report.charts.figure import (
    BLUE,
    INK,
    NAMED_CLASSES,
    class_label,
    explain_empty,
    new_figure,
    save,
    style,
)
from tessera.utils.report.palette import class_hex, class_text

_LABELLED_CLASSES = 20  # up to here, a legend has a line for each class
_POINTS = 201  # of a line, where there are more classes
_NUMBERED = 41  # rows of a matrix with numbers in the cells
_FAINT = "#9aa5b1"


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
