"""Fine-tuning from weights that know all classes: they stay the best checkpoint until an epoch is better."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.commands import train
from tessera.utils.checkpoints.format import load_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import load_hyp
from tessera.utils.engine.state import INITIAL
from tests.system.tiny import describe_coco128


@pytest.fixture
def few(shared: Path, tmp_path: Path) -> Path:
    """Eight images of coco128."""
    data = describe_coco128(tmp_path, shared)
    images = sorted((shared / "coco128" / "images" / "train2017").iterdir())[:8]
    (tmp_path / "few.txt").write_text("\n".join(map(str, images)))
    text = data.read_text().replace("images/train2017", str(tmp_path / "few.txt"))
    data.write_text(text)
    return data


def test_a_fine_tuning_does_not_end_below_its_start(
    shared: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the epochs do; nor does one that is resumed, and the anchors that were trained stay."""
    official = shared / "weights" / "yolov5n.pt"
    ruinous = tmp_path / "hyp.yaml"
    text = "".join(f"{key}: {value}\n" for key, value in (load_hyp("hyp.known.yaml").as_dict() | {"lr0": 1.0}).items())
    ruinous.write_text(text)
    common = {"workers": 0, "device": "cpu", "noplots": True, "loggers": "none", "project": str(tmp_path / "runs")}
    flags = {"data": str(few), "weights": str(official), "imgsz": 128, "batch_size": 4, "hyp": str(ruinous), **common}
    with caplog.at_level("INFO"):
        metrics = train.run(epochs=1, **flags)
    assert metrics is not None and metrics.map > 0.1
    (before,) = (line for line in caplog.messages if line.startswith("Before training:"))
    assert f"{metrics.map:.3g}" in before
    assert "No epoch is better than the initial weights; validated again" in capsys.readouterr().out
    weights = tmp_path / "runs" / "exp" / "weights"
    best, began = load_weights(weights / "best.pt").state_dict, load_weights(official).state_dict
    assert all(torch.equal(best[name], tensor) for name, tensor in began.items())
    assert load_checkpoint(weights / "last.pt")["stopper"]["best_epoch"] == INITIAL

    resumed = train.run(resume=str(weights / "last.pt"), epochs=2, **common)
    assert resumed is not None and resumed.map == metrics.map
    assert load_checkpoint(weights / "last.pt")["stopper"]["best_epoch"] == INITIAL
    again = load_weights(weights / "best.pt").state_dict
    assert all(torch.equal(again[name], tensor) for name, tensor in began.items())
