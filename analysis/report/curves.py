"""Chart data of the report page, drawn by page.js: curves over epochs, and over confidence for the slider."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.report.page_data import ReportData
from tessera.utils.evaluation.matching import CONFIDENCES

if TYPE_CHECKING:
    import pandas as pd  # a validation does without

POINTS = 250  # of a line: a pixel or two has one
STEPS = 200  # confidences of the slider, and beside them the best one of all classes and of each
MOST_CLASSES = 80  # that have curves of their own: those with most objects
_PARTS = 1000  # of 1, that a ratio is sent in
_LOSS = re.compile(r"train/(.+)_loss")
_PANELS = {
    "mAP": {"metrics/mAP_0.5:0.95": "mAP50-95", "metrics/mAP_0.5": "mAP50"},
    "Precision and recall": {"metrics/precision": "precision", "metrics/recall": "recall"},
}
_RATES = {"Learning rate": {"x/lr1": "weights", "x/lr2": "norm weights"}}
_TIMES = {
    "Images per second": {"images_per_s": "training"},
    "Fraction of the time spent waiting for images": {"time/data_wait": "waiting"},
}

Chart = dict[str, Any]


def line_chart(axis: str, x: NDArray[Any], series: Mapping[str, NDArray[Any]], *, mark: float | None = None) -> Chart:
    """Return lines over one axis, as `draw` of page.js takes them.

    `x` (K,) is ascending, and thinned to `POINTS`, including both ends; non-finite values of `series` are gaps.
    """
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(np.int64))
    lines = [[name, [_short(value) for value in values[keep].tolist()]] for name, values in series.items()]
    return {"axis": axis, "x": [_short(value) for value in x[keep].tolist()], "series": lines, "mark": mark}


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def loss_names(results: pd.DataFrame) -> list[str]:
    """Return the names of the losses in results.csv."""
    return [match[1] for match in map(_LOSS.fullmatch, results.columns) if match]


def training_series(results: pd.DataFrame) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Return the series of results.png and the page by title and name, without empty ones; only "epoch" is required."""
    names = loss_names(results)
    panels = {f"Loss: {name}": {f"train/{name}_loss": "train", f"val/{name}_loss": "val"} for name in names}
    found = {}
    for title, columns in {**_PANELS, **panels, **_RATES, **_TIMES}.items():
        series = {name: results[column].to_numpy(float) for column, name in columns.items() if column in results}
        if series := {name: values for name, values in series.items() if np.isfinite(values).any()}:
            found[title] = series
    return found


def training_charts(results: pd.DataFrame, best: int | None) -> tuple[dict[str, Chart], dict[str, Chart]]:
    """Return charts over the epochs by title: metrics, and times; `best` is the epoch to mark."""
    epochs = results["epoch"].to_numpy(float)
    mark = best if best in epochs else None
    charts = {
        title: line_chart("epoch", epochs, series, mark=mark) for title, series in training_series(results).items()
    }
    times = {title: charts.pop(title) for title in _TIMES if title in charts}
    return charts, times


def threshold_curves(facts: ReportData) -> dict[str, Any] | None:
    """Return precision, recall and F1 at every confidence for the slider, in thousandths; None without objects.

    `start` is the step of the page's confidence. Counts are detections, true positives and objects.
    """
    curves, ranking = facts.found.curves, facts.found.ranking
    if len(curves.class_ids) == 0:
        return None
    objects = np.diff(ranking.target_offsets)
    chosen = np.sort(np.argsort(-objects, kind="stable")[:MOST_CLASSES])
    own, start = curves.class_best, round(facts.found.metrics.confidence * (len(CONFIDENCES) - 1))
    even = np.linspace(0, len(CONFIDENCES) - 1, STEPS + 1).round().astype(np.int64)
    steps = np.unique(np.concatenate((even, [start, curves.best], own[chosen])))
    ratios = {"p": curves.precision, "r": curves.recall, "f": curves.f1}
    groups = []
    names = ["all that have objects", *(facts.name(int(curves.class_ids[row])) for row in chosen)]
    members = [np.arange(len(objects)), *chosen[:, None]]
    for name, rows, best in zip(names, members, [curves.best, *own[chosen].tolist()], strict=True):
        sent = {key: np.rint(_PARTS * values[rows][:, steps].mean(0)) for key, values in ratios.items()}
        sent |= {"n": ranking.above[rows][:, steps].sum(0), "c": ranking.correct_above[rows][:, steps].sum(0)}
        group = {key: values.astype(int).tolist() for key, values in sent.items()}
        place = int(np.searchsorted(steps, best))
        groups.append({**group, "name": name, "best": place, "objects": int(objects[rows].sum())})
    confidence = [round(value, 4) for value in CONFIDENCES[steps].tolist()]
    start, left = int(np.searchsorted(steps, start)), len(curves.class_ids) - len(chosen)
    return {"confidence": confidence, "groups": groups, "start": start, "left": left}
