"""A training without what surrounds the core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.commands import train
from tessera.utils.extensions import EXTENSIONS
from tests.system.tiny import make_data


@pytest.mark.parametrize("noplots", [False, True])
def test_a_training_is_whole_without_the_report(
    noplots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(EXTENSIONS, "validation report", "tessera.absent.report")
    yaml = make_data(tmp_path / "data", train=4, val=2)
    flags = {"imgsz": 64, "workers": 0, "epochs": 1, "batch": 4, "loggers": "none", "device": "cpu"}
    assert train.run(data=yaml, project=tmp_path, noplots=noplots, **flags) is not None
    assert caplog.text.count("The run ends without error analysis and report.html") == 1
    run = tmp_path / "exp"
    assert {path.name for path in run.iterdir()} >= {"results.csv", "opt.yaml", "hyp.yaml", "weights"}
    assert sorted(path.name for path in (run / "weights").iterdir()) == ["best.pt", "last.pt"]
    assert (run / "results.png").exists() != noplots and not (run / "report.html").exists()
