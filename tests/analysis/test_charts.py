"""Properties of charts: what they show, legibility, and bounds with many classes and objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from tessera.analysis import charts
from tessera.analysis.charts import (
    plot_confidence_curve,
    plot_confusion_matrix,
    plot_labels,
    plot_pr_curve,
    plot_results,
    plot_validation,
)
from tessera.utils.engine.state import INITIAL
from tessera.utils.evaluation.curves import best_step
from tessera.utils.evaluation.matching import CONFIDENCES
from tessera.utils.report.results_csv import result_columns
from tests.analysis.made_charts import confusion_of, curves, index, names

AWKWARD = ["_hidden", "$5 or $6", r"$\frac", "100 %", "a\nb", "汽车", ""]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were saved."""
    made: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        made.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield made


def results(epochs: int, **columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    keys = result_columns(("box", "obj", "cls"))[1:]
    frame = pd.DataFrame({"epoch": np.arange(epochs), **{key: rng.uniform(0.1, 0.9, epochs) for key in keys}})
    return frame.assign(**columns)


def shown(texts: list[Text]) -> list[Bbox]:
    return [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]


def assert_legible(figure: Figure) -> None:
    """All text lies within the figure, no tick label on another of its axis, no title on another."""
    page = figure.bbox.padded(1)
    titles = [axes.title for axes in figure.axes]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            drawn = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert_apart(shown(drawn), page)
    assert_apart(shown(titles), page)
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    for legend in legends:
        assert_apart(shown(list(legend.get_texts())), page)


def assert_apart(boxes: list[Bbox], page: Bbox) -> None:
    for box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for a, b in combinations(boxes, 2):
        shared = Bbox.intersection(a, b)
        assert shared is None or min(shared.width, shared.height) < 1.5


def panel(figure: Figure, title: str) -> Axes:
    (found,) = [axes for axes in figure.axes if axes.get_title().startswith(title)]
    return found


@pytest.mark.parametrize("epochs", [1, 5, 300])
def test_results_are_legible_for_any_number_of_epochs(epochs: int, tmp_path: Path, figures: list[Figure]) -> None:
    plot_results(results(epochs), tmp_path / "results.png", 0)
    assert len(figures[0].axes) == 8
    assert_legible(figures[0])


def test_the_raw_line_is_what_was_measured_and_the_bold_one_its_average(tmp_path: Path, figures: list[Figure]) -> None:
    frame = results(100)
    plot_results(frame, tmp_path / "results.png", None)
    raw, smooth, *_ = panel(figures[0], "Precision and recall").lines
    assert np.array_equal(raw.get_ydata(), frame["metrics/precision"])
    assert np.std(smooth.get_ydata()) < np.std(raw.get_ydata()) / 2
    assert [line.get_label() for line in panel(figures[0], "Loss: box").get_legend().get_lines()] == ["train", "val"]
    for line, column in zip(panel(figures[0], "Learning rate").lines, ("x/lr1", "x/lr2"), strict=True):
        assert np.array_equal(line.get_ydata(), frame[column])


@pytest.mark.parametrize(
    ("best", "title"),
    [
        (2, "mAP50-95 0.300 at the best epoch, 2"),
        (INITIAL, "No epoch is better than the initial weights"),
        (1, "mAP"),
        (None, "mAP"),
    ],
)
def test_the_best_epoch_is_that_of_the_run(best: int | None, title: str, tmp_path: Path, figures: list[Figure]) -> None:
    """Whatever the table says, which may lack its row."""
    frame = results(3, **{"metrics/mAP_0.5:0.95": [0.1, 0.4, 0.3]}).drop(index=1)
    plot_results(frame, tmp_path / "results.png", best)
    shown = panel(figures[0], title)
    stars = [line.get_xydata().ravel().tolist() for line in shown.lines if line.get_marker() == "*"]
    assert shown.get_title() == title and stars == ([[2, 0.3]] if best == 2 else [])


def test_a_run_without_validation_has_no_empty_panels(tmp_path: Path, figures: list[Figure]) -> None:
    frame = results(12)
    frame[[column for column in frame if column.startswith(("metrics/", "val/"))]] = np.nan
    plot_results(frame, tmp_path / "results.png", None)
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles[:5] == ["Loss: box", "Loss: obj", "Loss: cls", "Learning rate", "Images per second"]
    assert all(axes.lines for axes in figures[0].axes)


def test_gaps_infinities_and_empty_charts_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    plot_results(results(20, **{"train/box_loss": [np.inf, np.nan] * 5 + [1.0] * 10}), tmp_path / "gaps.png", 7)
    assert len(panel(figures[0], "Loss: box").lines[0].get_ydata()) == 10
    plot_results(results(0), tmp_path / "empty.png", None)
    assert figures[1].axes[0].texts[0].get_text() == "no epoch has been completed yet"
    plot_labels(index(["a", "b"], 0), tmp_path / "labels.jpg")
    assert [axes.texts[0].get_text() for axes in figures[2].axes[1:]] == ["no objects"] * 3


@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize("count", [1, 3, 8, 80])
def test_labels_name_every_class_legibly(count: int, kind: str, tmp_path: Path, figures: list[Figure]) -> None:
    data = index(names(count, kind), 200)
    plot_labels(data, tmp_path / "labels.jpg")
    histogram = figures[0].axes[0]
    assert [bar.get_height() for bar in histogram.patches] == np.bincount(data.classes, minlength=count).tolist()
    assert len(shown(histogram.get_xticklabels())) == count
    assert_legible(figures[0])


def test_sizes_and_centres_are_those_of_the_boxes(tmp_path: Path, figures: list[Figure]) -> None:
    data = index(["a"], 1)
    data.boxes_xyxy[:] = [0, 240, 320, 480]  # left half, lower half of 640 x 480
    plot_labels(data, tmp_path / "labels.jpg")
    _, _, centres, sizes = figures[0].axes
    for axes, place in ((centres, [37, 12]), (sizes, [25, 25])):  # rows by y of 50 cells a side
        assert np.argwhere(axes.collections[0].get_array()).tolist() == [place]
    assert centres.get_ylim() == (1, 0)  # as in an image, y points down


def test_columns_of_the_confusion_matrix_are_shares_of_the_true_class(tmp_path: Path, figures: list[Figure]) -> None:
    matrix = np.array([[6, 0, 1], [2, 0, 3], [2, 0, 0]])  # rows predicted, columns true; class 1 has no objects
    plot_confusion_matrix(confusion_of(matrix), 0.25, ["cat", "dog"], tmp_path / "confusion_matrix.png")
    axes = figures[0].axes[0]
    image = axes.images[0].get_array()
    assert image[:, 0].tolist() == pytest.approx([0.6, 0.2, 0.2])
    assert image[1, 2] == pytest.approx(0.75)
    assert image[:, 1].mask.all()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("True class", "Predicted class")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "background"]
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "0.60", (0, 1): "0.20", (0, 2): "0.20", (2, 0): "0.25", (2, 1): "0.75"}


@pytest.mark.parametrize(("count", "kind"), [(1, "short"), (40, "long"), (80, "long")])
def test_the_confusion_matrix_is_legible(count: int, kind: str, tmp_path: Path, figures: list[Figure]) -> None:
    matrix = np.eye(count + 1) + np.eye(count + 1, k=1)
    plot_confusion_matrix(confusion_of(matrix), 0.25, names(count, kind), tmp_path / "confusion_matrix.png")
    (axes, *_) = figures[0].axes
    assert len(shown(axes.get_xticklabels())) == len(shown(axes.get_yticklabels())) == count + 1
    assert_legible(figures[0])
    assert all(text.get_window_extent().width < axes.get_window_extent().width / (count + 1) for text in axes.texts)


@pytest.mark.parametrize("count", [1, 20, 21])
def test_curves_have_a_bold_mean_and_a_legend_that_fits(count: int, tmp_path: Path, figures: list[Figure]) -> None:
    data = curves(count)
    plot_confidence_curve(data, data.f1, names(count, "long"), "F1", tmp_path / "F1_curve.png")
    plot_pr_curve(data, names(count, "long"), tmp_path / "PR.png")
    for figure in figures:
        assert_legible(figure)
        labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert len(labels) == (1 if count == 1 else count + 1 if count <= 20 else 2)
    first = figures[0].axes[0].get_legend().get_texts()[0].get_text()
    at = data.best if count > 1 else data.class_best[0]
    assert f"{data.f1[:, at].mean():.3f} at {CONFIDENCES[at]:.3f}" in first
    assert f"{data.ap50.mean():.3f}" in figures[1].axes[0].get_legend().get_texts()[0].get_text()


def test_the_curves_mark_the_confidence_that_is_used(tmp_path: Path, figures: list[Figure]) -> None:
    """Of the best smoothed F1, which best.pt keeps; a single lucky point is higher, and is not marked."""
    f1 = np.full((2, 1000), 0.2)
    f1[0, 300:500], f1[1, 400:600], f1[:, 900] = 0.6, 0.5, 0.9
    data = dataclasses.replace(
        curves(2),
        class_ids=np.array([3, 1]),
        f1=f1,
        best=best_step(f1.mean(0)),
        class_best=np.array([*map(best_step, f1)]),
    )
    assert 400 <= data.best < 500 and [300 <= step < 600 for step in data.class_best] == [True, True]
    plot_validation(tmp_path, data, confusion_of(np.eye(5)), 0.25, ["a", "b", "c", "d"])
    for figure, values in zip(figures[1:4], (data.precision, data.recall, data.f1), strict=True):
        (mark,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
        used = CONFIDENCES[data.best]
        assert [float(np.squeeze(at)) for at in mark.get_data()] == [used, values[:, data.best].mean()]
        labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        own = [(name, values[i, k], CONFIDENCES[k]) for name, i, k in zip("db", (0, 1), data.class_best, strict=True)]
        assert labels[1:] == [f"{name} {value:.3f} at {at:.3f}" for name, value, at in own]
        assert labels[0] == f"all classes {values[:, data.best].mean():.3f} at {used:.3f}"


def test_a_validation_without_objects_still_has_its_charts(tmp_path: Path, figures: list[Figure]) -> None:
    plot_validation(tmp_path, curves(0), confusion_of(np.zeros((3, 3))), 0.25, ["a", "b"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"confusion_matrix.png", *(f"{kind}_curve.png" for kind in ("P", "R", "F1", "PR"))}
    assert [figure.axes[0].texts[0].get_text() for figure in figures[1:]] == ["no labelled objects"] * 4


@pytest.mark.filterwarnings("error")
def test_awkward_names_are_taken_literally(tmp_path: Path, figures: list[Figure]) -> None:
    count = len(AWKWARD)
    plot_validation(tmp_path, curves(count), confusion_of(np.eye(count + 1)), 0.25, AWKWARD)
    plot_labels(index(AWKWARD, 50), tmp_path / "labels.jpg")
    legend: NDArray[Any] = figures[1].axes[0].get_legend()
    assert len(legend.get_texts()) == count + 1
    assert "$5 or $6" in legend.get_texts()[2].get_text().replace("\\$", "$")


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
    monkeypatch.setattr(charts, "_AT_ONCE", 999)
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
