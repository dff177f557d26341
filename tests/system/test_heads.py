"""Whole runs of models with other heads than YOLOv5's: they train, plot, stop, resume, validate and are exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tessera.commands import export, val
from tessera.utils.report.results import read_results, result_columns
from tests.system.jobs import train
from tests.system.launch import ROOT, Command, Outcome
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data


class Run(NamedTuple):
    """A finished training: what it was told, its folder, its dataset, what it said, and the names of its losses."""

    wanted: tuple[str, ...]
    folder: Path
    data: Path
    said: str
    losses: tuple[str, ...]


def trained(folder: Path, cfg: str, old: str, new: str, names: str) -> Run:
    """Two epochs of a model whose YAML has `new` in the place of `old`."""
    data, changed = make_data(folder), folder / "changed.yaml"
    changed.write_text((ROOT / "models" / cfg).read_text().replace(old, new))
    wanted = ("--cfg", str(changed), "--epochs", "2")
    plotted = [flag for flag in flags(data, folder / "whole", *wanted) if flag != "--noplots"]
    whole = train(folder, 1, *plotted)
    assert whole.code == 0, whole.said
    return Run(wanted, folder / "whole" / "exp", data, whole.err, tuple(names.split()))


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """tessera-n with both kinds of branches."""
    names = "box cls dfl one_box one_cls one_dfl"
    branches = ("DetectFree, [nc]", "DetectFree, [nc, 16, 1, true]")
    return trained(tmp_path_factory.mktemp("free"), "tessera-n.yaml", *branches, names)


@pytest.fixture(scope="module")
def yolox(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """yolox-tiny, narrower."""
    widths = ("width_multiple: 0.375", "width_multiple: 0.125")
    return trained(tmp_path_factory.mktemp("yolox"), "yolox-tiny.yaml", *widths, "box obj cls")


@pytest.fixture(params=["free", pytest.param("yolox", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


Measure = Callable[..., Outcome]


@pytest.fixture
def measure(command: Command, tmp_path: Path) -> Measure:
    """val.py of a run's best.pt, with more flags."""

    def measured(run: Run, *more: str) -> Outcome:
        weights = ("--weights", str(run.folder / "weights" / "best.pt"), "--data", str(run.data), "--workers", "0")
        return command(val.main, *weights, "--imgsz", "64", "--device", "cpu", "--project", str(tmp_path), *more)

    return measured


def test_its_losses_are_reported_and_drawn(run: Run) -> None:
    assert all(f"{name}_loss" in run.said for name in run.losses), "columns of the progress bar"
    table = read_results(run.folder / "results.csv")
    assert tuple(table.columns) == result_columns(run.losses)
    assert table.notna().all().all()
    for picture in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run.folder / picture).stat().st_size > 0, picture
    last = torch.load(run.folder / "weights" / "last.pt", weights_only=True)
    assert last["anchors"] is None and last["stride"] == [8.0, 16.0, 32.0]


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_by_bit(run: Run, tmp_path: Path) -> None:
    stopped = train(tmp_path, 1, *flags(run.data, tmp_path, *run.wanted), fault="0 step 4 SIGTERM")
    assert stopped.code == 143, stopped.said
    last = tmp_path / "exp" / "weights" / "last.pt"
    assert torch.load(last, weights_only=True)["step_in_epoch"] == 1, "inside an epoch"
    resumed = train(tmp_path, 1, "--resume", str(last), "--device", "cpu")
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(last, run.folder / "weights" / "last.pt")
    assert losses(tmp_path / "exp").equals(losses(run.folder))


def test_it_is_validated(run: Run, tmp_path: Path, measure: Measure) -> None:
    assert measure(run, "--augment", "--half", "--save-json").code == 0
    assert (tmp_path / "exp" / "predictions.json").is_file()


def test_its_branch_without_suppression_is_measured(free: Run, measure: Measure) -> None:
    assert measure(free, "--end2end").code == 0
    refused = measure(free, "--end2end", "--augment")
    assert refused.code == 2 and refused.err.count("Leave one of them out") == 1, refused.said


@pytest.mark.slow
def test_a_head_without_that_branch_says_so(yolox: Run, measure: Measure) -> None:
    refused = measure(yolox, "--end2end")
    assert refused.code == 2 and "DetectYOLOX has no one-to-one branch" in refused.err, refused.said


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True], ids=["whole", "raw"])
def test_its_export_finds_what_it_finds(yolox: Run, raw: bool) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    export.run(weights=str(yolox.folder / "weights" / "best.pt"), imgsz=64, device="cpu", include=["onnx"], raw=raw)


@pytest.mark.slow
def test_it_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    wanted = ("--cfg", "tessera-n.yaml", "--epochs", "2", "--sync-bn", "--amp", "off")
    whole = train(tmp_path, 1, *flags(data, tmp_path / "whole", *wanted))
    assert whole.code == 0, whole.said
    for before, after in ((1, 2), (2, 1)):
        project = tmp_path / f"from{before}"
        stopped = train(tmp_path, before, *flags(data, project, *wanted), fault="0 step 4 SIGTERM")
        last = project / "exp" / "weights" / "last.pt"
        assert torch.load(last, weights_only=True)["step_in_epoch"] == 1, f"inside an epoch\n{stopped.said}"
        resumed = train(tmp_path, after, "--resume", str(last), "--device", "cpu")
        assert resumed.code == 0, resumed.said
        assert read_results(project / "exp" / "results.csv")["epoch"].tolist() == [0, 1]
        # Rounding apart the same run: a batch that counted twice or not at all would be a third of the epoch's mean.
        ratio = losses(project / "exp").to_numpy() / losses(tmp_path / "whole" / "exp").to_numpy()
        assert abs(ratio - 1).max() < 0.03
