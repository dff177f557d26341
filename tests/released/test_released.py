"""Checkpoints of released versions: detect, validate, fine-tune and resume as before."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tessera.analysis.charts import read_results
from tessera.commands import train
from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint
from tests.released.kept import FOLDER, detections, expected, flags, kept_files, measured, minor_version
from tests.released.squares import COUNTS, write_squares

PIXELS, SCORE, METRIC, LOSS = 0.5, 0.01, 0.02, 0.05  # how far another machine's rounding may lead, generously

KEPT = kept_files()
each = pytest.mark.parametrize("weights", KEPT, ids=lambda path: str(path.relative_to(FOLDER)))
each_last = pytest.mark.parametrize(
    "weights", [path for path in KEPT if path.name == "last.pt"], ids=lambda path: str(path.relative_to(FOLDER))
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"))


def test_this_minor_version_has_checkpoints() -> None:
    assert {path.name for path in KEPT if path.parents[1].name == minor_version()} == {"last.pt", "best.pt"}, (
        "uv run python -m tests.released"
    )


@each
def test_it_says_which_version_wrote_it(weights: Path) -> None:
    assert load_any_checkpoint(weights)["tessera_version"].startswith(f"{weights.parents[1].name}.")


@each
def test_it_detects_as_before(weights: Path) -> None:
    found, before = detections(weights), expected(weights)["detections"]
    assert [[row[5] for row in rows] for rows in found] == [[row[5] for row in rows] for rows in before]
    for rows, kept in zip(found, before, strict=True):
        for row, wanted in zip(rows, kept, strict=True):
            assert row[:4] == pytest.approx(wanted[:4], abs=PIXELS) and row[4] == pytest.approx(wanted[4], abs=SCORE)


@each
def test_it_has_the_metrics_of_before(weights: Path, data: Path, tmp_path: Path) -> None:
    assert measured(weights, data, tmp_path) == pytest.approx(expected(weights)["metrics"], abs=METRIC)


@each
def test_training_starts_from_it(weights: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = train.run(**flags(data, tmp_path), weights=str(weights), epochs=1)
    assert metrics is not None and metrics.map50 > expected(weights)["metrics"]["map50"] - METRIC
    count = len(load_any_checkpoint(weights)["ema"])
    assert any(text.startswith(f"Loaded {count} of {count} tensors from ") for text in caplog.messages), caplog.messages


@each_last
def test_it_is_resumed(weights: Path, data: Path, tmp_path: Path) -> None:
    last = tmp_path / "runs" / "kept" / "weights" / "last.pt"
    last.parent.mkdir(parents=True)
    shutil.copy(weights, last)
    before = load_checkpoint(last)
    train.run(resume=str(last), data=str(data), epochs=before["epoch"] + 1)
    after, wanted = load_checkpoint(last), expected(weights)["resumed"]
    assert after["epoch"] == before["epoch"] + 1
    assert after["step"] == before["step"] + COUNTS["train"] // flags(data, last)["batch_size"]
    assert {int(moments["step"]) for moments in after["optimizer"]["state"].values()} == {after["step"]}
    row = read_results(tmp_path / "runs" / "kept" / "results.csv").set_index("epoch").loc[before["epoch"]]
    assert {name: float(row[name]) for name in wanted} == pytest.approx(wanted, rel=LOSS)
