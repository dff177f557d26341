"""A whole run of a model with YOLOX's head: it trains, stops, resumes, plots, validates, is exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tessera.utils.report.results import read_results, result_columns
from tests.system.jobs import train
from tests.system.launch import ROOT, run_python
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data


@dataclass(frozen=True)
class Run:
    """A finished training: what it was told, its folder, its dataset, and what it said."""

    wanted: tuple[str, ...]
    folder: Path
    data: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs of yolox-tiny, narrower."""
    tmp_path = tmp_path_factory.mktemp("yolox")
    data = make_data(tmp_path)
    cfg = tmp_path / "narrow.yaml"
    described = (ROOT / "models" / "yolox-tiny.yaml").read_text()
    cfg.write_text(described.replace("width_multiple: 0.375", "width_multiple: 0.125"))
    wanted = ("--cfg", str(cfg), "--epochs", "2")
    plotted = [flag for flag in flags(data, tmp_path / "whole", *wanted) if flag != "--noplots"]
    whole = train(tmp_path, 1, *plotted)
    assert whole.code == 0, whole.said
    return Run(wanted, tmp_path / "whole" / "exp", data, whole.err)


def best(run: Run) -> tuple[str, ...]:
    """Flags of its checkpoint."""
    return "--weights", str(run.folder / "weights" / "best.pt"), "--imgsz", "64", "--device", "cpu"


def test_its_losses_are_reported_and_drawn(run: Run) -> None:
    names = ("box", "obj", "cls")
    assert all(f"{name}_loss" in run.said for name in names), "columns of the progress bar"
    table = read_results(run.folder / "results.csv")
    assert tuple(table.columns) == result_columns(names)
    assert table.notna().all().all()
    for picture in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run.folder / picture).stat().st_size > 0, picture


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_by_bit(run: Run, tmp_path: Path) -> None:
    stopped = train(tmp_path, 1, *flags(run.data, tmp_path, *run.wanted), fault="0 step 4 SIGTERM")
    assert stopped.code == 143, stopped.said
    again = tmp_path / "exp"
    assert torch.load(again / "weights" / "last.pt", weights_only=True)["step_in_epoch"] == 1, "inside an epoch"
    resumed = train(tmp_path, 1, "--resume", str(again / "weights" / "last.pt"), "--device", "cpu")
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(again / "weights" / "last.pt", run.folder / "weights" / "last.pt")
    assert losses(again).equals(losses(run.folder))


@pytest.mark.slow
def test_it_is_validated(run: Run, tmp_path: Path) -> None:
    more = ("--data", str(run.data), "--project", str(tmp_path), "--augment", "--half")
    measured = run_python(ROOT / "val.py", *best(run), *more)
    assert measured.code == 0, measured.said
    refused = run_python(ROOT / "val.py", *best(run), "--end2end")
    assert refused.code == 2 and "DetectYOLOX has no one-to-one branch" in refused.err, refused.said


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--raw",)], ids=["whole", "raw"])
def test_its_export_finds_what_it_finds(run: Run, more: tuple[str, ...]) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    exported = run_python(ROOT / "export.py", *best(run), "--include", "onnx", *more)
    assert exported.code == 0, exported.said
