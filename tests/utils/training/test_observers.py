"""A training without what surrounds the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.commands import train
from tessera.utils import extensions
from tests.system.tiny import make_data


@pytest.mark.parametrize("noplots", [False, True])
def test_a_training_is_whole_without_its_extensions(
    noplots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extensions, "EXTENSIONS", dict.fromkeys(extensions.EXTENSIONS, "tessera.absent.part"))
    yaml = make_data(tmp_path / "data", train=4, val=2)
    flags = {"imgsz": 64, "workers": 0, "epochs": 1, "batch": 4, "loggers": "tensorboard", "device": "cpu"}
    assert train.run(data=yaml, project=tmp_path, noplots=noplots, weights="", **flags) is not None
    for part, times in (("validation report", 1), ("trackers", 1), ("plots", int(not noplots))):
        assert caplog.text.count(f"lacks the {part}: tessera.absent is missing. The training runs without") == times
    run = tmp_path / "exp"
    assert {path.name for path in run.iterdir()} == {"results.csv", "opt.yaml", "hyp.yaml", "weights"}
    assert sorted(path.name for path in (run / "weights").iterdir()) == ["best.pt", "last.pt"]
