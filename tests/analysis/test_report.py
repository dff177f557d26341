"""report.html: its size and bytes, its sentences and chart data; the names of users are text in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.analysis.report import advice, html_page
from tessera.analysis.report.html_page import format_commands
from tessera.analysis.report.page import answers, cells_of, gallery, page
from tessera.analysis.report.page_data import (
    MOST_CLASSES,
    POINTS,
    ReportData,
    breakdowns,
    class_rows,
    confusion_table,
    line_chart,
    threshold_curves,
)
from tessera.utils.engine.state import INITIAL
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind
from tests.analysis.made_page import HEBREW, HOSTILE, assert_safe, made_report_data, trained
from tests.utils.evaluation.made_images import matrix_of


@pytest.fixture
def facts(tmp_path: Path) -> ReportData:
    return made_report_data(tmp_path, ["cat", "dog", "horse", "empty"], images=20)


def test_the_page_is_reproducible_loads_nothing_and_runs_only_its_own_script(facts: ReportData) -> None:
    facts = trained(facts, [0.1, 0.2, 0.3, float("nan"), 0.25])
    text = page(facts)
    assert text == page(facts)
    policy = next(attrs["content"] for _, attrs in assert_safe(text, scripts=2).found if "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy
    for element in ("script", "style"):
        (body,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy


def test_names_of_classes_and_files_are_text(tmp_path: Path) -> None:
    text = page(made_report_data(tmp_path, HOSTILE, images=20))
    assert_safe(text, scripts=2)
    assert html.escape(HOSTILE[0]) in text and HEBREW in text


def test_thousands_of_classes_stay_below_five_megabytes(tmp_path: Path) -> None:
    names = [f"{i} {'x' * 500}" for i in range(1203)]
    facts = made_report_data(tmp_path, names, images=400)
    assert len(facts.found.metrics.class_ids) > 400
    text = page(trained(facts, [0.1] * 5000))
    assert_safe(text, scripts=2)
    assert confusion_table(facts, ())["left"] == 1203 - MOST_CLASSES
    assert "classes not shown" in text and "more not shown" in text


def test_crops_have_a_budget(facts: ReportData, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gallery(facts)
    sizes = [len(error["crop"].uri) for error in whole]
    assert min(sizes) > 0
    monkeypatch.setattr(html_page, "BYTES", sum(sizes) // 2)
    some = gallery(facts)
    kept = sum(len(error["crop"].uri) for error in some)
    assert len(some) == len(whole) and sum(sizes) // 4 < kept < sum(sizes)
    monkeypatch.setattr(html_page, "DECODED", 0)
    assert not any(error["crop"].uri for error in gallery(facts))


def test_an_image_that_is_gone_leaves_its_errors_without_crops(facts: ReportData) -> None:
    worst = facts.items[0].image
    facts.index.path(worst).unlink()
    shown = gallery(facts)
    assert [bool(error["crop"].uri) for error in shown] == [
        facts.items[error["number"] - 1].image != worst for error in shown
    ]


def test_crops_show_the_boxes(facts: ReportData) -> None:
    for error in gallery(facts):
        item = facts.items[error["number"] - 1]
        boxes = {"true": item.true_box, "found": item.box}
        assert [mark["kind"] for mark in error["crop"].marks] == [
            kind for kind, box in boxes.items() if box is not None
        ]
        for mark in error["crop"].marks:
            x1, y1, x2, y2 = boxes[mark["kind"]] or (0, 0, 0, 0)
            assert mark["width"] / mark["height"] == pytest.approx((x2 - x1) / (y2 - y1), rel=0.05)


def test_each_error_is_in_the_cell_that_counts_it(facts: ReportData) -> None:
    errors = facts.errors
    cells = cells_of(errors, facts.items)
    listed = np.zeros((5, 5), np.int64)
    for predicted, true in cells:
        listed[predicted, true] += 1
    counted = matrix_of(errors)
    off = ~np.eye(5, dtype=bool)
    off[-1] = False  # of undetected objects, those of a localization error have no error of their own
    assert (listed[off] == counted[off]).all() and listed.sum() == len(facts.items)
    assert (listed[-1, :-1] <= counted[-1, :-1]).all()


def test_the_matrix_leads_to_what_the_gallery_has(facts: ReportData) -> None:
    shown = gallery(facts)
    pairs = {error["pair"] for error in shown}
    cells = [cell for row in confusion_table(facts, pairs)["rows"] for cell in row]
    assert {cell["pair"] for cell in cells if cell["pair"]} == pairs
    assert sum(cell["number"] for cell in cells) == matrix_of(facts.errors).sum()


def test_counts_of_the_tables_add_up(facts: ReportData) -> None:
    errors, counts = facts.errors, facts.errors.counts()
    for table in breakdowns(facts):
        assert sum(row["objects"] for row in table["rows"]) == len(errors.outcomes)
        assert sum(row["counts"][0] for row in table["rows"]) == counts[Kind.CORRECT]
        assert sum(row["counts"][-1] for row in table["rows"]) == counts[Kind.MISSED]
    assert sum(row["false"] for row in class_rows(facts)) <= sum(counts[kind] for kind in FALSE_KINDS)


def test_the_slider_has_the_figures_of_the_validation(facts: ReportData) -> None:
    sent = threshold_curves(facts)
    assert sent is not None
    whole, best = sent["groups"][0], sent["groups"][0]["best"]
    metrics, counts = facts.found.metrics, facts.errors.counts()
    assert sent["confidence"][best] == pytest.approx(metrics.confidence, abs=1e-4)
    assert whole["p"][best] == round(1000 * metrics.precision) and whole["r"][best] == round(1000 * metrics.recall)
    assert whole["c"][best] == counts[Kind.CORRECT] and whole["objects"] == metrics.objects
    for group, c in zip(sent["groups"][1:], metrics.class_ids, strict=True):
        assert sent["confidence"][group["best"]] == pytest.approx(metrics.class_confidences[c], abs=1e-4)
    assert len(json.dumps(sent)) < 30_000


def test_a_set_without_objects_has_a_page(tmp_path: Path) -> None:
    facts = made_report_data(tmp_path, ["a"], images=0)
    assert "no object in the labels" in page(facts)
    assert "no epoch" not in page(trained(facts, [float("nan")])).lower()


def test_a_class_called_background_is_not_the_background(tmp_path: Path) -> None:
    facts = made_report_data(tmp_path, ["background", "b"], images=8)
    heat = confusion_table(facts, ())
    assert heat["names"] == ["background", "b", "background"]
    assert heat["rows"][0][0]["says"].endswith("background: detected")


def test_flags_of_the_command_are_those_that_were_given(facts: ReportData) -> None:
    config = dataclasses.replace(facts.origin.config, save_txt=True, name="two words", local_rank=3)
    origin = dataclasses.replace(facts.origin, config=config)
    program, *given = origin.command.split(" --")
    assert program == "uv run val.py" and sorted(given) == ["data some.yaml", "name 'two words'", "save-txt"]


def test_what_the_dataset_leaves_out_is_said(facts: ReportData) -> None:
    said = "val: `classes` leaves out 1 of 5 classes with 3 objects in 2 images: '<b>' 3"
    assert "leaves out" not in page(facts)
    told = page(dataclasses.replace(facts, index=dataclasses.replace(facts.index, excluded_summary=said)))
    assert f"<p>{html.escape(said)}.</p>" in told.replace("&#39;", "&#x27;")


NAN = float("nan")


def test_found_share_and_best_epoch() -> None:
    said = advice.detected_fraction(0.2139, "where F1 is best", 103, 143, 154)
    assert "0.214, where F1 is best, 103 of 143 objects" in said and "(72\u00a0%)" in said
    assert "154 of 257 detections are false positives (60\u00a0%)" in said
    assert advice.detected_fraction(0.5, "given", 0, 5, 0).count("0 of") == 2
    assert not advice.detected_fraction(0.5, "given", 0, 0, 9)
    assert advice.best_epoch(7, 8, "last.pt") == "The best epoch is 7, counted from 0, of 8 that were trained."
    assert advice.best_epoch(3, 8, "w/last.pt").endswith("trained; the weights are those of the last one.")
    assert "initial weights, which best.pt holds" in advice.best_epoch(INITIAL, 8, "best.pt")
    assert advice.best_epoch(None, 8, "last.pt").startswith("No epoch has a finite fitness")


@pytest.mark.parametrize(
    ("maps", "best", "said"),
    [
        ([0.1, NAN, 0.2, NAN], 2, "Unknown: 2 epochs were validated"),
        (np.linspace(0, 0.5, 20), 19, "Probably: the curve still rises (the mean of the last 4 epochs is +0.105"),
        ([0.1, 0.3, 0.5, *[0.4] * 17], 2, "No: the best was epoch 2, and 17 later ones"),
        ([*np.linspace(0, 0.5, 20), *[0.5] * 20, 0.501], 40, "Hardly: the curve is flat"),
        ([NAN, 0.1, NAN, 0.5, NAN, *[0.4] * 8], 3, "No: the best was epoch 3, and 8 later ones"),
        ([0.4] * 10, INITIAL, "No: the initial weights are the best, and 10 later epochs were not"),
        ([0.4] * 10, None, "Hardly: the curve is flat"),
    ],
)
def test_more_epochs(maps: Sequence[float], best: int | None, said: str) -> None:
    assert said in advice.more_epochs(np.arange(len(maps)), np.array(maps, float), best)


def test_overfits() -> None:
    epochs = np.arange(4, 24)
    assert not advice.overfits(epochs, np.linspace(1, 0.1, 20)) and not advice.overfits(epochs, np.full(20, NAN))
    assert not advice.overfits(epochs[:3], np.array([1, 0.5, 0.9])), "too few"
    said = advice.overfits(epochs[:12], np.array([1, 0.5, 0.4, *[0.6] * 9]))
    assert "lowest in epoch 6 (0.400) and has risen since, to 0.600" in said


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([5, 0, 9, 0], "b and d are in no image of the train split."),
        ([5, 0, 9, 7], "b is in no image of the train split."),
        ([50, 10, 90, 60], "few images in the train split: b (10); the median class is in 55."),
        ([50, 40, 90, 60], "at least 40 images"),
        ([0] * 9, "a, b, c, d, e and 4 more are in no"),
    ],
)
def test_lacking(images: list[int], said: str) -> None:
    assert said in advice.lacking("abcdefghi"[: len(images)], np.array(images), "train")
    assert not advice.lacking(["a"], np.array([5]), "train")


def test_what_else_is_said_only_where_it_was_measured() -> None:
    worst = advice.worst_class(["a", "b", "c"], np.array([0, 2]), np.array([0.5, 0.1]))
    assert worst == "c has the lowest mAP50-95: 0.100; the mean is 0.300."
    assert not advice.worst_class(["a"], np.array([0]), np.array([0.5]))
    assert "waited for images 40\u00a0% of its time: try --cache ram" in advice.waits(0.4)
    assert advice.waits(0.1).endswith(" 10\u00a0% of its time.") and not advice.waits(NAN)
    assert "1,000 steps skipped" in advice.skipped_steps(1000) and not advice.skipped_steps(0)
    assert "±\u00a00.040" in advice.too_small((0.3, 0.38), 67) and not advice.too_small((0.3, 0.31), 67)
    assert not advice.too_small((NAN, NAN), 67)
    assert "2 problems: `uv run train.py --data d.yaml --check-data`" in advice.problems(2, "d.yaml")
    assert "1 problem:" in advice.problems(1, "d.yaml") and not advice.problems(0, "d.yaml")


def test_what_a_training_without_use_needs_comes_before_kinds_of_errors(facts: ReportData) -> None:
    def next_steps(*fitnesses: float, **origin: Any) -> str:
        ended = trained(facts, fitnesses)
        assert ended.results is not None
        results = ended.results.assign(**{"metrics/mAP_0.5": fitnesses, "train/box_loss": [1.0, *[0.0] * 5]})
        ended = dataclasses.replace(ended, results=results, origin=dataclasses.replace(ended.origin, **origin))
        said = answers(ended)
        assert "overfits" not in "".join(said["Would more epochs help?"])
        return " ".join(said["What to do next?"])

    box = frozenset({"box"})
    best = facts.found.metrics.fitness
    usual = next_steps(0.1, 0.2, 0.3, 0.3, 0.4, best, unused_losses=box)
    assert "cost most" in usual
    collapse = next_steps(0.1, best, 0.2, 0.0, 0.01 * best, 0.0, unused_losses=box)
    assert f"from epoch 3 on the fitness is at most {0.01 * best:.3f}, after 0.200. Lower lr0" in collapse
    assert "cost most" not in collapse and "--imgsz" not in collapse
    idle = next_steps(0.1, 0.2, 0.3, 0.3, 0.4, best)
    assert "The loss box was exactly 0 in the last epoch" in idle and "cost most" not in idle


def test_weights_that_detect_almost_nothing_need_no_larger_images(facts: ReportData) -> None:
    metrics = dataclasses.replace(facts.found.metrics, map50=0.004)
    poor = dataclasses.replace(facts, found=dataclasses.replace(facts.found, metrics=metrics))
    said = " ".join(answers(poor)["What to do next?"])
    assert "Almost nothing is detected (mAP50 0.004)" in said and "cost most" not in said and "--imgsz" not in said


def test_errors_that_cost_most_and_those_that_are_most_frequent() -> None:
    one, other = {Kind.MISSED: 0.1, Kind.BACKGROUND: 0.2}, {Kind.MISSED: 9, Kind.BACKGROUND: 1234}
    said = advice.main_errors(one, other, 0.25, 100)
    assert "“background” cost most: over all confidences, mAP50 would be 0.200 higher without them (1,234 at" in said
    assert "lack a label" in said and "most errors" not in said
    both = advice.main_errors(one, {Kind.MISSED: 394, Kind.BACKGROUND: 20}, 0.25, 900)
    assert "“background” cost most" in both and "At confidence 0.250 most errors are of the kind “missed”: 394" in both
    assert "lack a label" in both and "--tile" in both
    rare = advice.main_errors({Kind.MISSED: 0.001}, {Kind.MISSED: 9}, 0.25, 100)
    assert rare.startswith("At confidence 0.250 most errors are of the kind “missed”: 9;")
    assert not advice.main_errors({Kind.MISSED: 0.001}, {Kind.MISSED: 5}, 0.25, 100)


def test_commands_and_flags_are_set_as_such_and_names_are_text() -> None:
    said = format_commands("<b> & more: `detect.py --agnostic-nms`, or --epochs. No flag: a--b, --, ---, --<i>")
    assert str(said) == (
        '&lt;b&gt; &amp; more: <code>detect.py <span class="flag">--agnostic-nms</span></code>, or '
        '<span class="flag">--epochs</span>. No flag: a--b, --, ---, --&lt;i&gt;'
    )


def test_lines_have_gaps_and_are_thinned_and_keep_their_ends() -> None:
    chart = line_chart("epoch", np.arange(3), {"a": np.array([0.12345678, NAN, np.inf])})
    assert chart["x"] == [0, 1, 2] and chart["series"] == [["a", [0.12346, None, None]]]
    chart = line_chart("x", np.arange(100_001), {"a": np.arange(100_001)})
    assert len(chart["x"]) == POINTS and (chart["x"][0], chart["x"][-1]) == (0, 1e5)
