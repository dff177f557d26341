"""What is logged, by which rank, and the lines of a validation."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from tessera.analysis.report.advice import interval_line, speed_line
from tessera.utils.report.console import setup_logging, table_header, validation_line
from tessera.utils.text import table_row
from tessera.utils.types import Metrics


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before
    logging.captureWarnings(False)


def test_rank_0_is_heard_and_others_only_with_errors_and_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = logging.getLogger("tessera.data.source.index"), logging.getLogger("urllib3")

    def say() -> list[str]:
        ours.info("information")
        ours.warning("careful")
        ours.error("broken")
        theirs.warning("noise")
        theirs.error("their error")
        warnings.warn("python warns", UserWarning, stacklevel=1)
        out, err = capsys.readouterr()
        assert out == ""
        return [line for line in err.splitlines() if not line.startswith("  ")]

    with warnings.catch_warnings():
        setup_logging(0, 2)  # a run in a context whose end puts the hook of `warnings` back
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setup_logging(0, 2)
        setup_logging(0, 2)  # a second run in the same process must not print everything twice
        *lines, python = say()
        assert lines == ["information", "WARNING: careful", "ERROR: broken", "ERROR: their error"]
        assert python.startswith("WARNING: ") and python.endswith("UserWarning: python warns")
        setup_logging(1, 2)
        assert say() == ["rank 1: ERROR: broken", "rank 1: ERROR: their error"]


METRICS = Metrics(
    precision=0.71234,
    recall=0.5,
    map50=0.6,
    map=0.4,
    class_ids=np.array([0, 2]),
    per_class=np.array([[0.9, 0.6, 0.8, 0.5], [0.52468, 0.4, 0.4, 0.3]]),
    images_per_class=np.array([3, 0, 2]),
    objects_per_class=np.array([7, 0, 2]),
    images=5,
    objects=9,
    confidence=0.3,
    class_confidences=np.array([0.25, 0.3, 0.41]),
)


def test_lines_are_aligned() -> None:
    named = dataclasses.replace(METRICS, names=("cat", "unused", "a name that is far too long to stand"))
    header, lines = table_header(), [table_row(*row) for row in named.rows()]
    assert header.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert lines[0] == validation_line(METRICS)
    assert lines[0].split() == ["all", "5", "9", "0.712", "0.5", "0.6", "0.4"]
    assert lines[2].split()[-6:] == ["2", "2", "0.525", "0.4", "0.4", "0.3"] and "..." in lines[2]
    assert len(lines) == 3 and {len(line) for line in lines} == {len(header)}


def test_speed_and_interval_lines() -> None:
    assert speed_line((0.54, 3.2, 0.9), (32, 3, 640, 640)) == (
        "Speed: 0.5 ms preprocessing, 3.2 ms inference, 0.9 ms NMS per image at shape (32, 3, 640, 640)"
    )
    assert interval_line(METRICS, 0.351, 0.449) == (
        "mAP50-95 0.400, 95 % interval 0.351 to 0.449 (bootstrap over 5 images)"
    )
    nothing = dataclasses.replace(METRICS, map=0.0)
    assert interval_line(nothing, math.nan, math.nan) == ("mAP50-95 is undefined: no object in the labels of 5 images")


def test_metrics_print_as_a_small_table() -> None:
    header, everything, *classes = str(METRICS).splitlines()
    assert header.split("  ")[-1].strip() == "best conf" and len(header) == len(everything)
    assert everything.split() == ["all", "5", "9", "0.712", "0.5", "0.6", "0.4", "0.3"]
    assert [line.split() for line in classes] == [
        ["0", "3", "7", "0.9", "0.6", "0.8", "0.5", "0.25"],
        ["2", "2", "2", "0.525", "0.4", "0.4", "0.3", "0.41"],
    ]
    named = str(dataclasses.replace(METRICS, names=("cat", "unused", "dog"))).splitlines()
    assert [line.split()[0] for line in named] == ["class", "all", "cat", "dog"]
    many = dataclasses.replace(METRICS, class_ids=np.arange(21), per_class=np.zeros((21, 4)))
    assert str(many).splitlines() == [header, everything]
