"""Sentences and chart data of the report page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tessera.utils.evaluation.matching import Kind
from tessera.utils.report.page import advice
from tessera.utils.report.page.curves import POINTS, line_chart
from tessera.utils.report.page.template import format_commands

NAN = float("nan")


def test_found_share_and_best_epoch() -> None:
    said = advice.detected_fraction(0.2139, 103, 143, 154, is_taken=True)
    assert "0.214, which detect.py uses with these weights, 103 of 143 objects" in said and "(72\u00a0%)" in said
    assert "154 of 257 detections are false positives (60\u00a0%)" in said
    of_another = advice.detected_fraction(0.0, 0, 5, 0, is_taken=False)
    assert of_another.count("0 of") == 2 and "0.000, where F1 is best, 0" in of_another
    assert not advice.detected_fraction(0.5, 0, 0, 9, is_taken=True)
    assert advice.best_epoch(7, 8).startswith("The best epoch is 7, counted from 0, of 8")
    assert advice.best_epoch(-1, 8) == advice.best_epoch(None, 8) and "initial weights" in advice.best_epoch(-1, 8)


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        ([0.1, NAN, 0.2, NAN], "Unknown: 2 epochs were validated"),
        (np.linspace(0, 0.5, 20), "Probably: the curve still rises (the mean of the last 4 epochs is +0.105"),
        ([0.1, 0.3, 0.5, *[0.4] * 17], "No: the best was epoch 2, and 17 later ones"),
        ([*np.linspace(0, 0.5, 20), *[0.5] * 20, 0.501], "Hardly: the curve is flat"),
        ([NAN, 0.1, NAN, 0.5, NAN, *[0.4] * 8], "No: the best was epoch 3, and 8 later ones"),
    ],
)
def test_more_epochs(maps: Sequence[float], said: str) -> None:
    assert said in advice.more_epochs(np.array(maps, float))


def test_overfits() -> None:
    falling = np.linspace(1, 0.1, 20)
    assert not advice.overfits(falling) and not advice.overfits(np.full(20, NAN))
    assert not advice.overfits(np.array([1, 0.5, 0.9])), "too few"
    said = advice.overfits(np.array([1, 0.5, 0.4, *[0.6] * 9]))
    assert "lowest in epoch 2 (0.400) and has risen since, to 0.600" in said


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
    said = advice.costliest({Kind.MISSED: 0.1, Kind.BACKGROUND: 0.2}, {Kind.MISSED: 9, Kind.BACKGROUND: 1234})
    assert "“background” cost most: without them mAP50 would be 0.200 higher (1,234" in said and "lack a label" in said
    assert not advice.costliest({Kind.MISSED: 0.001}, {Kind.MISSED: 9})
    assert "waited for images 40\u00a0% of its time: try --cache ram" in advice.waits(0.4)
    assert advice.waits(0.1).endswith(" 10\u00a0% of its time.") and not advice.waits(NAN)
    assert "1,000 steps skipped" in advice.skipped_steps(1000) and not advice.skipped_steps(0)
    assert "±\u00a00.040" in advice.too_small((0.3, 0.38), 67) and not advice.too_small((0.3, 0.31), 67)
    assert not advice.too_small((NAN, NAN), 67)
    assert "2 problems: `uv run train.py --data d.yaml --check-data`" in advice.problems(2, "d.yaml")
    assert "1 problem:" in advice.problems(1, "d.yaml") and not advice.problems(0, "d.yaml")


def test_commands_and_flags_are_set_as_such_and_names_are_text() -> None:
    said = format_commands("<b> & more: `detect.py --agnostic-nms`, or --epochs. No flag: a--b, --, ---, --<i>")
    assert str(said) == (
        '&lt;b&gt; &amp; more: <code>detect.py <span class="flag">--agnostic-nms</span></code>, or '
        '<span class="flag">--epochs</span>. No flag: a--b, --, ---, --&lt;i&gt;'
    )


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    chart = line_chart("epoch", np.arange(3), {"a": np.array([0.12345678, NAN, np.inf])})
    assert chart["x"] == [0, 1, 2] and chart["series"] == [["a", [0.12346, None, None]]]


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    chart = line_chart("x", np.arange(100_001), {"a": np.arange(100_001)})
    assert len(chart["x"]) == POINTS and (chart["x"][0], chart["x"][-1]) == (0, 1e5)
