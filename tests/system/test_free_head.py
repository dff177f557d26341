"""A whole run of a model with the anchor-free head and both kinds of branches: it trains, stops, resumes, validates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.utils.report.results import read_results, result_columns
from tests.system.jobs import train
from tests.system.launch import ROOT, run_python
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data


def test_it_trains_stops_resumes_plots_and_validates(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    described = (ROOT / "models" / "tessera-n.yaml").read_text()
    cfg = tmp_path / "end2end.yaml"
    cfg.write_text(described.replace("DetectFree, [nc]", "DetectFree, [nc, 16, 1, true]"))
    wanted = ("--cfg", str(cfg), "--epochs", "2")
    plotted = [flag for flag in flags(data, tmp_path / "whole", *wanted) if flag != "--noplots"]
    whole = train(tmp_path, 1, *plotted)
    assert whole.code == 0, whole.said
    names = ("box", "cls", "dfl", "one_box", "one_cls", "one_dfl")
    assert all(f"{name}_loss" in whole.err for name in names), "columns of the progress bar"
    run = tmp_path / "whole" / "exp"
    table = read_results(run / "results.csv")
    assert tuple(table.columns) == result_columns(names)
    assert table.notna().all().all()
    for picture in ("results.png", "labels.jpg", "confusion_matrix.png", "PR_curve.png", "val_batch0_pred.jpg"):
        assert (run / picture).stat().st_size > 0, picture
    last = torch.load(run / "weights" / "last.pt", weights_only=True)
    assert last["anchors"] is None and last["stride"] == [8.0, 16.0, 32.0]

    stopped = train(tmp_path, 1, *flags(data, tmp_path / "stopped", *wanted), fault="0 step 4 SIGTERM")
    assert stopped.code == 143, stopped.said
    again = tmp_path / "stopped" / "exp"
    assert torch.load(again / "weights" / "last.pt", weights_only=True)["step_in_epoch"] == 1, "inside an epoch"
    resumed = train(tmp_path, 1, "--resume", str(again / "weights" / "last.pt"), "--device", "cpu")
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(again / "weights" / "last.pt", run / "weights" / "last.pt")
    assert losses(again).equals(losses(run))

    weights = ("--weights", str(run / "weights" / "best.pt"), "--data", str(data), "--imgsz", "64", "--device", "cpu")
    measured = run_python(ROOT / "val.py", *weights, "--project", str(tmp_path / "val"), "--augment", "--save-json")
    assert measured.code == 0, measured.said
    assert (tmp_path / "val" / "exp" / "predictions.json").is_file()

    once = run_python(ROOT / "val.py", *weights, "--project", str(tmp_path / "val"), "--end2end")
    assert once.code == 0, once.said
    refused = run_python(ROOT / "val.py", *weights, "--end2end", "--augment")
    assert refused.code == 2 and refused.err.count("Leave one of them out") == 1, refused.said


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
