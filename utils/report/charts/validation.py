"""What a validation found: the confusion matrix, and curves over confidence and recall.

What a chart holds is bounded, however many classes there are: above so many it shows a part of them, and says so.

Legend: C classes, C' classes that have objects, K confidences, R recalls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from tessera.utils.evaluation.confusion import ConfusionMatrix
from tessera.utils.evaluation.curves import Curves
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
_DRAWN_CLASSES = 200  # up to here, each class has a line; above, bands of the classes' quantiles tell more
_BAND_POINTS = 201  # along the axis of a band
_BANDS = ((0.05, 0.15), (0.25, 0.3))  # lower quantile, opacity; the upper one mirrors it
_WHOLE_MATRIX = 500  # classes; above it, a cell would have less than five pixels
_NUMBERED = 41  # rows with the share in each cell
_MOST_CONFUSED = _NUMBERED - 2  # classes of a larger matrix that are shown
_FAINT = "#9aa5b1"


def plot_validation(run: Path, curves: Curves, confusion: ConfusionMatrix, names: Sequence[str]) -> None:
    """All charts of a validation into its folder: `confusion_matrix.png` and `{P,R,F1,PR}_curve.png`.

    Args:
        run: the folder.
        curves: as `summarize` returns them.
        confusion, names: as in `plot_confusion_matrix`.
    """
    confidence = float(curves.confidence[curves.best])
    plot_confusion_matrix(confusion, confidence, names, run / "confusion_matrix.png")
    plot_confidence_curve(curves, curves.precision, names, "Precision", run / "P_curve.png")
    plot_confidence_curve(curves, curves.recall, names, "Recall", run / "R_curve.png")
    plot_confidence_curve(curves, curves.f1, names, "F1", run / "F1_curve.png")
    plot_pr_curve(curves, names, run / "PR_curve.png")


def plot_confusion_matrix(confusion: ConfusionMatrix, confidence: float, names: Sequence[str], target: Path) -> None:
    """Which class is taken for which (`confusion_matrix.png`), each column divided by its sum.

    Args:
        confusion: which class is taken for which.
        confidence: that of the detections in it is at least so high.
        names: class names by index, C.
    """
    assert confusion.nc == len(names), (confusion.nc, len(names))
    names = [class_text(number, name) for number, name in enumerate(names)]
    labels = [*names, "background"]
    title = f"Confusion matrix at confidence {confidence:.3f} and IoU 0.5 (share of each true class)"
    group_of = np.arange(len(labels))
    if len(names) > _WHOLE_MATRIX:
        title = f"{title}\n{_MOST_CONFUSED} most confused of {len(names):,} classes, the others as one"
        chosen = np.sort(confusion.confusions().argsort(kind="stable")[-_MOST_CONFUSED:])
        labels = [*(names[i] for i in chosen), f"other {len(names) - len(chosen):,}", "background"]
        group_of = np.full(len(names) + 1, len(chosen))
        group_of[chosen], group_of[-1] = range(len(chosen)), len(chosen) + 1
    matrix, count = confusion.grouped(group_of), len(labels)
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
    if count <= NAMED_CLASSES:
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
    """Precision, recall or F1 over the confidence (`P_curve.png`, `R_curve.png`, `F1_curve.png`).

    Marked is the confidence that the figures of a validation are given at; in the legend, each class has its own, as of
    `--conf-thres auto`.

    Args:
        curves: whose confidences, classes and choices count.
        values: (C', K), of `curves`.
        names: class names by index.
        quantity: "Precision", "Recall" or "F1": the axis and the legend.
    """
    figure = new_figure(10, 6.5)
    axes = figure.add_subplot()
    if len(values) == 0:
        explain_empty(axes, "no labelled objects")
    else:
        confidence, best, at_best = curves.confidence, curves.best, values[:, curves.best].mean()
        summary = f"all classes {at_best:.3f} at {confidence[best]:.3f}"
        own = curves.class_best()[:_LABELLED_CLASSES]  # more are not named
        details = [f"{values[i, k]:.3f} at {confidence[k]:.3f}" for i, k in enumerate(own)]
        _curves(axes, _Classes(confidence, values, curves.class_ids, names), summary, details)
        axes.plot(confidence[best], at_best, "o", color=INK, markersize=6, zorder=5)
    style(axes, f"{quantity} over confidence", "Confidence", quantity)
    save(figure, target)


def plot_pr_curve(curves: Curves, names: Sequence[str], target: Path) -> None:
    """Precision over recall at IoU 0.5 (`PR_curve.png`); in the legend, the area under each curve.

    Args:
        curves, names: as in `plot_confidence_curve`.
    """
    figure = new_figure(10, 6.5)
    axes = figure.add_subplot()
    if len(curves.ap50) == 0:
        explain_empty(axes, "no labelled objects")
    else:
        summary = f"all classes {curves.ap50.mean():.3f} mAP 0.5"
        details = [f"{ap:.3f}" for ap in curves.ap50[:_LABELLED_CLASSES]]
        classes = _Classes(curves.recall_axis, curves.precision_at_recall, curves.class_ids, names)
        _curves(axes, classes, summary, details)
    style(axes, "Precision over recall, IoU 0.5", "Recall", "Precision")
    save(figure, target)


class _Classes(NamedTuple):
    """A curve for each class: x (K,), values (C', K), the class of each row (C',), and class names by index."""

    x: NDArray[np.float64]
    values: NDArray[np.float64]
    class_ids: NDArray[np.int64]
    names: Sequence[str]


def _curves(axes: Axes, classes: _Classes, summary: str, details: Sequence[str]) -> None:
    """A thin line for each class, or bands of their quantiles; a bold line for their mean; a legend beside the axes.

    Args:
        axes: to draw on.
        classes: the curves.
        summary: of the mean, for the legend.
        details: of each class, for the legend, where it names them.
    """
    count = len(classes.values)
    handles: list[Artist] = []
    if count <= _LABELLED_CLASSES:
        for row, class_id, detail in zip(classes.values, classes.class_ids, details, strict=True):
            name = class_text(int(class_id), classes.names[class_id])
            label = f"{class_label(name, 28)} {detail}"
            handles += axes.plot(classes.x, row, color=class_hex(int(class_id)), linewidth=1.2, alpha=0.9, label=label)
    elif count <= _DRAWN_CLASSES:
        axes.plot(classes.x, classes.values.T, color=_FAINT, linewidth=0.7, alpha=0.6)
        handles.append(Line2D([], [], color=_FAINT, linewidth=0.7, label=f"each of {count} classes"))
    else:
        points = np.linspace(0, len(classes.x) - 1, min(len(classes.x), _BAND_POINTS)).round().astype(int)
        some = classes.values[:, points]
        for low, alpha in _BANDS:
            bounds = np.quantile(some, (low, 1 - low), axis=0)
            label = f"{1 - 2 * low:.0%} of {count:,} classes"
            handles.append(axes.fill_between(classes.x[points], *bounds, color=BLUE, alpha=alpha, lw=0, label=label))
    if count > 1:
        handles[:0] = axes.plot(classes.x, classes.values.mean(0), color=BLUE, linewidth=3, label=summary)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
