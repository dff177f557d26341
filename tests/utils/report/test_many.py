"""Charts of many classes and objects stay bounded, and say what is left out."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tessera.utils.report.charts import labels
from tessera.utils.report.charts.labels import plot_labels
from tessera.utils.report.charts.validation import plot_confidence_curve, plot_confusion_matrix
from tests.utils.report.made_charts import confusion_of, curves, index, names


def test_curves_of_many_classes_are_one_collection(tmp_path: Path, figures: list[Figure]) -> None:
    many, data = 1203, curves(1203)
    plot_confidence_curve(data, data.f1, names(many, "short"), "F1", tmp_path / "F1.png")
    axes = figures[0].axes[0]
    (lines,) = axes.collections
    assert len(axes.lines) == 2 and len(lines.get_segments()) == many and len(lines.get_segments()[0]) <= 201
    assert [text.get_text() for text in axes.get_legend().get_texts()][1:] == ["each of 1,203 classes"]
    assert lines.get_segments()[7][-1].tolist() == [1, data.f1[7, -1]]


def test_a_confusion_matrix_of_many_classes_shows_the_most_confused(tmp_path: Path, figures: list[Figure]) -> None:
    """Those are named; all others are one row and one column, so that columns keep their sums."""
    many = 1203
    matrix = 10 * np.eye(many + 1)
    matrix[700, 900] = matrix[900, 700] = 5  # rows predicted, columns true
    matrix[2, 700] = 3  # the next most confused
    matrix[many, 700] = 2  # missed: no confusion of classes
    plot_confusion_matrix(confusion_of(matrix), 0.25, names(many, "short"), tmp_path / "confusion_matrix.png")
    axes = figures[0].axes[0]
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert len(shown) == 41 and shown[-2:] == ["other 1,164", "background"]
    assert {"class 2", "class 700", "class 900"} <= set(shown)
    assert axes.get_title().endswith("39 most confused of 1,203 classes, the others together")
    cells = axes.images[0].get_array().filled(0)
    column = dict(zip(shown, cells[:, shown.index("class 700")], strict=True))
    assert column["class 700"] == 0.5 and column["class 900"] == 0.25
    assert column["class 2"] == 0.15 and column["background"] == pytest.approx(0.1)
    assert cells.sum(0) == pytest.approx(np.ones(41))
    assert cells[-2, -2] == 1


def test_labels_of_many_objects_are_counted_in_pieces(
    tmp_path: Path, figures: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells and bars hold what a count of all objects together gives, whatever the pieces."""
    monkeypatch.setattr(labels, "_AT_ONCE", 999)
    data = index(names(600, "short"), 30_000)
    plot_labels(data, tmp_path / "labels.jpg")
    histogram, overlay, centres, sizes = figures[0].axes
    assert histogram.get_xlabel() == "Class index" and len(overlay.collections[0].get_paths()) == 1000
    scale = np.array([640, 480])
    low, high = data.boxes_xyxy[:, :2] / scale, data.boxes_xyxy[:, 2:] / scale
    for axes, points in ((centres, (low + high) / 2), (sizes, high - low)):
        expected = np.histogram2d(*points.T, bins=100, range=((0, 1), (0, 1)))[0].T
        assert np.abs(axes.collections[0].get_array().filled(0) - expected).sum() <= 10  # rounding at a cell's edge
    assert np.array_equal(histogram.patches[0].get_data().values, np.bincount(data.classes, minlength=600))
    assert len(histogram.patches) == 1


def test_labels_hold_no_copy_of_all_boxes(tmp_path: Path) -> None:
    """A training waits for labels.jpg: memory does not grow with the objects."""
    data = index(names(3, "short"), 500_000)
    tracemalloc.start()
    try:
        plot_labels(data, tmp_path / "labels.jpg")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20  # all boxes as float64 are 15 MiB, and were held three times over
