"""The programs of examples/, for an epoch each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from examples import custom_augmentation, custom_loss, detect_folder, pretrain, train_and_evaluate
from tessera.models.model_yaml import HEADS
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import ConfigError
from tests.system.tiny import make_data


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few small images in place of the data of the examples, without workers, plots and trackers."""
    yaml = make_data(tmp_path / "data", train=8, val=4)
    flags = {"data": yaml, "imgsz": 64, "workers": 0, "noplots": True, "loggers": "none", "device": "cpu"}
    train: Callable[..., Any] = tessera.train
    monkeypatch.setattr(tessera, "train", lambda **given: train(**{**given, **flags}), raising=False)
    return yaml


def test_train_evaluate_and_detect(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = train_and_evaluate.main(epochs=1, project=tmp_path / "runs")
    assert "on 4 images" in capsys.readouterr().out
    pytest.importorskip("supervision")
    detect_folder.main(best, data.parent / "shapes" / "images" / "val")
    assert capsys.readouterr().out.count(" objects, the largest of ") == 4


def test_augmentation(tmp_path: Path) -> None:
    custom_augmentation.main(epochs=1, project=tmp_path)
    saved = torch.load(tmp_path / "noise" / "weights" / "last.pt", weights_only=True)
    assert saved["config"]["transforms"] == ["examples.custom_augmentation:add_noise"]
    with pytest.raises(ConfigError, match="give the same again"):
        tessera.train(resume=tmp_path / "noise", epochs=2)


def test_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "DetectSquared", custom_loss.DetectSquared)  # removed afterwards
    custom_loss.main(epochs=1, project=tmp_path)
    saved = torch.load(tmp_path / "squared" / "weights" / "last.pt", weights_only=True)
    assert "DetectSquared" in str(saved)


@pytest.mark.slow
def test_pretraining(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "DetectDistilled", pretrain.DetectDistilled)
    monkeypatch.setenv("TESSERA_DATASETS", str(tmp_path))
    monkeypatch.chdir(shared / "weights")
    pretrain.main(images=50, epochs=1, project=tmp_path, results=tmp_path)
    last = load_weights(tmp_path / "pretrained-tessera-n" / "weights" / "last.pt")
    assert any(".adapters." in name for name in last.state_dict) and pretrain.teacher()[1]
    weights = load_weights(tmp_path / "tessera-n.pt")
    assert weights.names[0] == "drawn circle" and not any(".adapters." in name for name in weights.state_dict)
    assert {t.dtype for t in weights.state_dict.values()} == {torch.float16, torch.int64}
    assert model_of_weights(weights, "tessera-n.pt").yaml["head"][-1][2] == "DetectFree"
