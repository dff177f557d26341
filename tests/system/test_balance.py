"""Class weights and balanced sampling in whole runs: stopped inside an epoch, they resume bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests.system.jobs import train
from tests.system.launch import ROOT
from tests.system.tiny import assert_same_checkpoint, flags, losses, make_data


@pytest.mark.slow
@pytest.mark.parametrize(("cfg", "weights"), [("yolov5n.yaml", "auto"), ("tessera-n.yaml", {"star": 5, "circle": 0.5})])
def test_a_stopped_run_resumes_bit_by_bit(tmp_path: Path, cfg: str, weights: object) -> None:
    data, hyp = make_data(tmp_path), tmp_path / "hyp.yaml"
    recipe = (ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text()
    hyp.write_text(recipe + yaml.safe_dump({"class_weights": weights}))
    wanted = ("--cfg", cfg, "--epochs", "2", "--hyp", str(hyp), "--sampling", "balanced")
    whole = train(tmp_path, 1, *flags(data, tmp_path / "whole", *wanted))
    assert whole.code == 0, whole.said
    assert whole.err.count("Class weights from") == 1 == whole.err.count("--sampling balanced: an image comes")
    stopped = train(tmp_path, 1, *flags(data, tmp_path, *wanted), fault="0 step 4 SIGTERM")
    assert stopped.code == 143, stopped.said
    last = tmp_path / "exp" / "weights" / "last.pt"
    state = torch.load(last, weights_only=True)
    assert state["step_in_epoch"] == 1 and state["hyp"]["class_weights"], "inside an epoch"
    resumed = train(tmp_path, 1, "--resume", str(last), "--device", "cpu")
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(last, tmp_path / "whole" / "exp" / "weights" / "last.pt")
    assert losses(tmp_path / "exp").equals(losses(tmp_path / "whole" / "exp"))
