"""Tests of damaged exports: false metadata or impossible outputs are one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.deploy.inference.detector import Detector
from tessera.utils.errors import UserError
from tests.deploy.runtime.made_files import ANSWER, ROWS, STRINGS, WHOLE_STRINGS, write_answer, write_rows

PICTURE = np.zeros((64, 64, 3), np.uint8)
NAN, DEEP = float("nan"), "[" * 100_000

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def found(path: Path) -> Any:
    (result,) = Detector(path, conf_thres=0.1, device="cpu")(PICTURE)
    return result


def test_sound_outputs_are_the_detections(tmp_path: Path) -> None:
    result = found(write_answer(tmp_path / "a.onnx", ANSWER))
    np.testing.assert_array_equal(result.boxes_xyxy, ANSWER["boxes"])
    np.testing.assert_array_equal(result.scores, ANSWER["scores"])
    np.testing.assert_array_equal(result.classes, ANSWER["classes"])
    assert found(write_rows(tmp_path / "b.onnx", ROWS)).classes.tolist() == [2, 0, 1]
    nothing = {name: value[:0] for name, value in ANSWER.items()}
    assert len(found(write_answer(tmp_path / "c.onnx", nothing)).scores) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"classes": np.array([-3, 0])}, "the class -3, expected 0 to 2"),
        ({"classes": np.array([0, 999])}, "the class 999, expected 0 to 2"),
        ({"classes": np.array([0.5, 1], np.float32)}, "the class 0.5, expected 0 to 2"),
        ({"boxes": np.ones((2, 5), np.float32)}, r"shapes \(2, 5\), \(2\), \(2\), expected"),
        ({"boxes": np.full((2, 4), NAN, np.float32)}, "boxes with numbers that are not finite"),
        ({"boxes": np.ones((3, 4), np.float32)}, r"shapes \(3, 4\), \(2\), \(2\), expected"),
        ({"boxes": np.ones((4, 2), np.float32)}, r"shapes \(4, 2\), \(2\), \(2\), expected"),
        ({"boxes": np.array([[0, 0, 1e9, 9]] * 2, np.float32)}, "a box outside the image of 64 × 64"),
        ({"boxes": np.array([[9, 9, 1, 1]] * 2, np.float32)}, "a box outside the image of 64 × 64"),
        ({"scores": np.array([NAN, 0.5], np.float32)}, "scores with numbers that are not finite"),
        ({"scores": np.array([5, 0.5], np.float32)}, "scores from 0.5 to 5, expected 0 to 1"),
        ({"scores": np.array(["high", "low"])}, "scores of .*, expected numbers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_outputs_of_a_detector(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write_answer(tmp_path / "best.onnx", {**ANSWER, **change})
    with pytest.raises(UserError, match=rf"best\.onnx: .*it computes .*{said}.* export it without"):
        found(path)


def test_more_boxes_than_were_asked_for(tmp_path: Path) -> None:
    path = write_answer(tmp_path / "best.onnx", {name: value.repeat(20, 0) for name, value in ANSWER.items()})
    (result,) = Detector(path, device="cpu")(PICTURE)
    assert len(result.scores) == 40
    with pytest.raises(UserError, match="it computes 40 boxes, expected 39 at most"):
        list(Detector(path, max_det=39, device="cpu")(PICTURE))


def test_an_output_that_is_missing_and_a_batch_that_no_network_has(tmp_path: Path) -> None:
    path = write_answer(tmp_path / "best.onnx", {name: ANSWER[name] for name in ("boxes", "scores")})
    with pytest.raises(UserError, match=r"best\.onnx: ONNX Runtime.* does not compute it \(.*classes.*\)\. Export"):
        found(path)
    for batch in (0, 10**9):
        with pytest.raises(UserError, match=r"best\.onnx: "):
            found(write_rows(tmp_path / "best.onnx", ROWS, batch=batch))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:, :, :6], r"rows of the shape \(1, 2, 6\), expected \(1, any, 7\)"),
        (ROWS[0], r"rows of the shape \(2, 7\), expected"),
        (ROWS.repeat(3, 0), r"rows of the shape \(3, 2, 7\), expected"),
        (ROWS * NAN, "rows with numbers that are not finite"),
        (ROWS + np.float32("inf"), "rows with numbers that are not finite"),
        (ROWS > 0, "rows of bool, expected numbers"),
    ],
    ids=["columns", "sides", "images", "NaN", "infinite", "flags"],
)
def test_impossible_outputs_of_a_bare_network(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"best\.onnx: .*it computes {said}"):
        found(write_rows(tmp_path / "best.onnx", rows))


@pytest.mark.parametrize(
    "change",
    [
        {"names": '["red", "green"]'},  # two of three
        {"names": "[1, 2, 3]"},
        {"names": '[["red"], "green", "blue"]'},
        {"names": json.dumps(["x" * 10_000, "green", "blue"])},
        {"names": '{"red": 1, "green": 2}'},
        {"names": DEEP},
        {"names": "null"},
        {"names": "[]"},
        {"imgsz": "1000000000"},
        {"imgsz": "-64"},
        {"imgsz": "x" * 100_000},
        {"imgsz": "70"},
        {"stride": "7"},
        {"stride": "0"},
        {"stride": "wide"},
        {"stride": "4096", "imgsz": "4096"},
        {"size_hw": "[64, 63]"},
        {"size_hw": "[64]"},
        {"size_hw": "[1e999, 64]"},
        {"conf": "NaN"},
        {"conf": "-1"},
        {"conf": "[0.5]"},
        {"conf_per_class": "[0.5]"},
        {"conf_per_class": "[0.5, NaN, 0.5]"},
        {"pixels": '{"range": [1, NaN]}'},
    ],
    ids=lambda change: "-".join(f"{key} {value[:20]}" for key, value in change.items()),
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "bare"])
def test_a_description_that_is_none(tmp_path: Path, change: dict[str, str], whole: bool) -> None:
    if whole:
        path = write_answer(tmp_path / "best.onnx", ANSWER, {**WHOLE_STRINGS, **change})
    else:
        path = write_rows(tmp_path / "best.onnx", ROWS, {**STRINGS, **change})
    with pytest.raises(UserError, match=r"best\.onnx: (its metadata is damaged|damaged, or no sound export)") as caught:
        found(path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
