"""Chart of a training over the epochs (`results.png`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tessera.analysis.report.page_data import training_series
from tessera.utils.engine.stopping import START
from tessera.utils.report.charts.figure import BLUE, INK, RED, explain_empty, new_figure, save, style


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
    if best == START:
        axes.set_title("No epoch is better than the initial weights", fontsize=11)
    row = epochs == best
    if row.any():
        axes.plot(epochs[row], maps[row], "*", color=INK, markersize=11, zorder=5)
        axes.set_title(f"mAP50-95 {maps[row][0]:.3f} at the best epoch, {best}", fontsize=11)
