"""A head in a folder of its own, tests/models/heads/extra/tiny, does all that the program's own does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.system.launch import ROOT, run_python, torchrun
from tests.system.test_parity import SIZE, Case, arguments, compare
from tests.system.tiny import assert_same_checkpoint, flags, make_data
from utils.report.results import read_results, result_columns

PROGRAM = Path(__file__).with_name("second_head.py")
FOLDER = ROOT / "tests" / "models" / "heads" / "extra" / "tiny"
MODEL = str(FOLDER / "tiny.yaml")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def test_it_trains_validates_saves_resumes_and_plots(data: Path, tmp_path: Path) -> None:
    asked = flags(data, tmp_path / "whole", "--cfg", MODEL, "--epochs", "3", "--save-period", "1", "--hyp")
    plots = [flag for flag in (*asked, "hyp.shapes.yaml") if flag != "--noplots"]
    whole = run_python(PROGRAM, "train", *plots)
    assert whole.code == 0, whole.said
    run = tmp_path / "whole" / "exp"
    assert "place_loss" in whole.err and "score_loss" in whole.err, "columns of the progress bar"
    table = read_results(run / "results.csv")
    assert tuple(table.columns) == result_columns(("place", "score"))
    assert table.notna().all().all()
    for picture in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run / picture).stat().st_size > 0, picture
    last = torch.load(run / "weights" / "last.pt", weights_only=True)
    assert last["anchors"] is None and last["stride"] == [8.0, 16.0] and last["epoch_losses"].shape == (1, 2)

    resumed = tmp_path / "resumed" / "exp"
    shutil.copytree(run, resumed)
    for name in ("best.pt", "last.pt"):
        shutil.copy(run / "weights" / "epoch0.pt", resumed / "weights" / name)
    outcome = run_python(PROGRAM, "train", "--resume", str(resumed / "weights" / "last.pt"), "--device", "cpu")
    assert outcome.code == 0, outcome.said
    assert_same_checkpoint(resumed / "weights" / "last.pt", run / "weights" / "last.pt")

    weights = ("--weights", str(run / "weights" / "best.pt"), "--data", str(data), "--imgsz", "64", "--device", "cpu")
    measured = run_python(PROGRAM, "val", *weights, "--project", str(tmp_path / "val"), "--augment", "--save-json")
    assert measured.code == 0, measured.said
    assert (tmp_path / "val" / "exp" / "predictions.json").is_file()


def test_its_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Its losses are divided by a sum over all ranks that only the forward tells."""
    data = make_data(tmp_path, train=32, val=2, size=SIZE)
    args = [*arguments(Case(), tmp_path), "--cfg", MODEL]
    alone = run_python(PROGRAM, "parity", str(data), str(tmp_path / "1.pt"), *args)
    both = torchrun(PROGRAM, "parity", str(data), str(tmp_path / "2.pt"), *args)
    assert alone.code == both.code == 0, alone.said + both.said
    compare(*(torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2)))
