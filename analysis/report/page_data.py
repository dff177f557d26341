"""Data of report.html: its tables, and its charts, which page.js draws."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.charts import TIME_PANELS, most_confused, training_series
from tessera.analysis.error_analysis import ErrorItem, ImageLabels
from tessera.analysis.error_counts import KINDS, Errors
from tessera.data.feed.image_sizes import fit_ratios
from tessera.utils.config import TrainConfig
from tessera.utils.evaluation.average_precision import Intervals
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.evaluation.matching import CONFIDENCES, Kind
from tessera.utils.flags.program import started
from tessera.utils.flags.val import ValConfig
from tessera.utils.image_size import ImageSize
from tessera.utils.text import one_line
from tessera.utils.thresholds import LOWEST_CONF
from tessera.utils.types import DatasetIndex

if TYPE_CHECKING:
    import pandas as pd  # a validation does without

MOST_ROWS = 1500  # of the table of classes: the lowest mAP50-95
MOST_CLASSES = 24  # of the confusion matrix: the most confused
SHADES = 8
# Lower edges of bins, and their names: pixels, width over height, objects.
_SIDES = (0, 8, 16, 32, 64, 128, 256)
_SIDE_NAMES = ("below 8", "8 to 15", "16 to 31", "32 to 63", "64 to 127", "128 to 255", "256 and more")
_ASPECTS = (0, 1 / 3, 2 / 3, 3 / 2, 3)
_ASPECT_NAMES = ("tall, below 1:3", "1:3 to 2:3", "2:3 to 3:2", "3:2 to 3:1", "wide, above 3:1")
_CROWDS = (1, 2, 5, 10, 20)
_CROWD_NAMES = ("1", "2 to 4", "5 to 9", "10 to 19", "20 and more")
_OUTCOMES = (Kind.CORRECT, Kind.WRONG_CLASS, Kind.LOCALIZATION, Kind.MISSED)
Values = dict[str, Any]
POINTS = 250  # of a line: a pixel or two has one
STEPS = 200  # confidences of the slider, and beside them the best one of all classes and of each
MOST_CURVES = 80  # that have curves of their own: those with most objects
_PARTS = 1000  # of 1, that a ratio is sent in


@dataclass(frozen=True)
class RunInfo:
    """Flags and circumstances of a run."""

    config: TrainConfig | ValConfig
    weights: str  # path or name
    imgsz: ImageSize
    device: str  # name, of rank 0
    ranks: int = 1
    trained_on: DatasetIndex | None = None  # training images; None for a validation
    epochs: int = 0  # number of trained epochs
    best_epoch: int | None = None  # as `EarlyStopping.best_epoch`
    skipped: int = 0  # training steps skipped in this process
    unused_losses: frozenset[str] = frozenset()  # names of the losses that are 0 by design

    @property
    def command(self) -> str:
        """The command line with its flags."""
        return shlex.join([*shlex.split(started(self.config.program)), *self.config.as_args()])


@dataclass(frozen=True)
class ReportData:
    """Data of the report page of a run."""

    found: Evaluation
    errors: Errors  # at the confidence of its metrics
    index: DatasetIndex  # the validation split
    interval: Intervals  # of mAP
    gains: Mapping[Kind, float]  # of mAP50, by kind of error
    items: Sequence[ErrorItem]  # the worst errors by cost
    labels: Mapping[int, ImageLabels]  # locations of their images' labels
    origin: RunInfo
    run: Path  # run directory
    results: pd.DataFrame | None = None  # as of `read_results`; None for a validation

    @property
    def is_taken(self) -> bool:
        """Whether detect.py uses the confidence of the page: best.pt stores it, and it is not too low."""
        return self.results is not None and self.errors.confidence >= LOWEST_CONF

    def name(self, class_id: int) -> str:
        """Return a class name for the page."""
        return one_line(self.index.names[class_id])


def class_rows(facts: ReportData) -> list[Values]:
    """Return metrics of each class that has objects, at the confidence of the best F1."""
    metrics, errors, trained = facts.found.metrics, facts.errors, facts.origin.trained_on
    counts = [metrics.images_per_class, metrics.objects_per_class]
    if trained is not None:
        counts.insert(0, images_by_class(trained))
    false = errors.class_kind_counts.sum(1) - errors.class_kind_counts[:, KINDS.index(Kind.CORRECT)]
    rows = []
    for row in np.sort(np.argsort(metrics.per_class[:, 3], kind="stable")[:MOST_ROWS]).tolist():
        c = int(metrics.class_ids[row])
        figures, confidence = metrics.per_class[row].tolist(), float(metrics.class_confidences[c])
        own = {"counts": [int(column[c]) for column in counts], "figures": figures}
        rows.append({"name": facts.name(c), **own, "false": int(false[c]), "confidence": confidence})
    return rows


def images_by_class(index: DatasetIndex) -> NDArray[np.int64]:
    """Count the images that have an object of each class: (C,)."""
    nc = len(index.names)
    images = np.repeat(np.arange(len(index), dtype=np.int64), np.diff(index.box_offsets))  # of the objects
    return np.bincount(np.unique(images * nc + index.classes) % nc, minlength=nc)


def confusion_table(facts: ReportData, shown_pairs: Collection[str]) -> Values:
    """Return the confusion matrix; `shown_pairs` are those of the errors in the gallery."""
    confusion = facts.errors.confusion
    chosen, matrix = most_confused(confusion, MOST_CLASSES)
    left = confusion.nc - len(chosen)
    names: dict[int | None, str | None] = {c: facts.name(c) for c in chosen.tolist()}
    names |= {None: f"{left:,} others", -1: None} if left else {-1: None}
    totals = np.maximum(matrix.sum(0), 1)

    def cell(count: int, fraction: float, predicted: int | None, true: int | None) -> Values:
        return {
            "number": count,
            "shade": int(np.ceil(fraction * SHADES)),
            "right": predicted == true,
            "pair": pair if count and (pair := f"{predicted} {true}") in shown_pairs else "",
            "says": f"{count:,} {in_words(names[predicted], names[true])}",
        }

    rows = [
        [
            cell(*one, predicted, true)
            for true, one in zip(names, zip(counts.tolist(), counts / totals, strict=True), strict=True)
        ]
        for counts, predicted in zip(matrix, names, strict=True)
    ]
    return {"names": [name or "background" for name in names.values()], "rows": rows, "left": left}


def in_words(predicted: str | None, true: str | None) -> str:
    """Describe a cell by the names of its row and column, None for background."""
    if predicted is None:
        return f"{true}: not detected"
    if true is None:
        return f"{predicted}: false positives"
    return f"{true}: predicted as {predicted}" if predicted != true else f"{true}: detected"


def breakdowns(facts: ReportData) -> list[Values]:
    """Return recall by size, by shape and by number of objects in the image; empty without objects."""
    errors = facts.errors
    if len(errors.outcomes) == 0:
        return []
    counts = np.diff(errors.offsets)
    images = np.repeat(errors.images, counts)
    rows = np.arange(len(images)) - np.repeat(errors.offsets[:-1], counts) + facts.index.box_offsets[images]
    boxes = facts.index.boxes_xyxy[rows]
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    sides = scaled_sizes(facts.index, images, boxes, facts.origin.imgsz)
    seen = f"side in pixels, in an image of {facts.origin.imgsz}"
    ratios, crowds, outcomes = width / np.maximum(height, 1e-6), np.repeat(counts, counts), errors.outcomes
    return [
        _recalls("Recall by size", seen, np.digitize(sides, _SIDES), _SIDE_NAMES, outcomes),
        _recalls("Recall by shape", "width to height", np.digitize(ratios, _ASPECTS), _ASPECT_NAMES, outcomes),
        _recalls("Recall by crowd", "objects in the image", np.digitize(crowds, _CROWDS), _CROWD_NAMES, outcomes),
    ]


def _recalls(
    title: str, noun: str, bins: NDArray[np.int64], names: tuple[str, ...], outcomes: NDArray[np.uint8]
) -> Values:
    """Count the outcomes of objects in each bin, from 1; `parts` are fractions."""
    table = np.zeros((len(names), len(Kind)), np.int64)
    np.add.at(table, (bins - 1, outcomes), 1)
    rows = []
    for name, counts in zip(names, table[:, list(_OUTCOMES)].tolist(), strict=True):
        if total := sum(counts):
            parts = [(kind.name.lower(), count / total) for kind, count in zip(_OUTCOMES, counts, strict=True)]
            rows.append({"name": name, "objects": total, "counts": counts, "recall": counts[0] / total, "parts": parts})
    return {"title": title, "noun": noun, "rows": rows}


def scaled_sizes(
    index: DatasetIndex, images: NDArray[np.int64], boxes_xyxy: NDArray[np.float32], imgsz: ImageSize
) -> NDArray[np.float64]:
    """Return the root of the area of boxes (M,), in pixels of images resized to `imgsz`."""
    area = np.maximum((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(1), 0)
    to, of = fit_ratios(index.sizes_hw[images], imgsz)
    return np.sqrt(area) * to / of


def splits_of(facts: ReportData) -> list[DatasetIndex]:
    """Return the known splits: both of a training, or the evaluated one."""
    trained_on = facts.origin.trained_on
    return [facts.index] if trained_on is None or trained_on.split == facts.index.split else [trained_on, facts.index]


def dataset(facts: ReportData) -> Values:
    """Summarise the dataset: images, objects and box sizes of each split, and what it leaves out."""
    splits = []
    for index in splits_of(facts):
        objects = np.diff(index.box_offsets)
        empty, most = int(((objects == 0) & ~index.labels_nothing()).sum()), int(objects.max(initial=0))
        height, width = np.median(index.sizes_hw, 0) if len(index) else (0, 0)
        counts = [len(index), len(index.classes), empty, most, len(index.ignored_classes)]
        splits.append({"name": index.split, "counts": counts, "sizes": f"{width:.0f} × {height:.0f}"})
    excluded = [one_line(index.excluded_summary, 1000) for index in splits_of(facts) if index.excluded_summary]
    return {"splits": splits, "excluded": excluded}


def line_chart(axis: str, x: NDArray[Any], series: Mapping[str, NDArray[Any]], *, mark: float | None = None) -> Values:
    """Return lines over one axis, as `draw` of page.js takes them.

    `x` (K,) is ascending, and thinned to `POINTS`, including both ends; non-finite values of `series` are gaps.
    """
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(np.int64))
    lines = [[name, [_short(value) for value in values[keep].tolist()]] for name, values in series.items()]
    return {"axis": axis, "x": [_short(value) for value in x[keep].tolist()], "series": lines, "mark": mark}


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def training_charts(results: pd.DataFrame, best: int | None) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return charts over the epochs by title: metrics, and times; `best` is the epoch to mark."""
    epochs = results["epoch"].to_numpy(float)
    mark = best if best in epochs else None
    charts = {
        title: line_chart("epoch", epochs, series, mark=mark) for title, series in training_series(results).items()
    }
    times = {title: charts.pop(title) for title in TIME_PANELS if title in charts}
    return charts, times


def threshold_curves(facts: ReportData) -> dict[str, Any] | None:
    """Return precision, recall and F1 at every confidence for the slider, in thousandths; None without objects.

    `start` is the step of the page's confidence. Counts are detections, true positives and objects.
    """
    curves, ranking = facts.found.curves, facts.found.ranking
    if len(curves.class_ids) == 0:
        return None
    objects = np.diff(ranking.target_offsets)
    chosen = np.sort(np.argsort(-objects, kind="stable")[:MOST_CURVES])
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
