"""A training without what surrounds the core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tessera.commands import train
from tests.system.tiny import make_data


@pytest.mark.parametrize("lacking", ["tessera.analysis", "tessera.deploy.inference.drawing", ""])
def test_a_training_is_whole_without_report_or_plots(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in list(sys.modules) if lacking else ():
        if name.startswith(("tessera.analysis", "tessera.deploy")):
            monkeypatch.delitem(sys.modules, name)
    if lacking:
        monkeypatch.setitem(sys.modules, lacking, None)
    yaml = make_data(tmp_path / "data", train=4, val=2)
    flags = {"imgsz": 64, "workers": 0, "epochs": 1, "batch": 4, "loggers": "none", "device": "cpu"}
    assert train.run(data=yaml, project=tmp_path, noplots=not lacking, noreport=not lacking, **flags) is not None
    run = tmp_path / "exp"
    assert {path.name for path in run.iterdir()} >= {"results.csv", "opt.yaml", "hyp.yaml", "weights"}
    assert sorted(path.name for path in (run / "weights").iterdir()) == ["best.pt", "last.pt"]
    for part in ("validation report", "plots"):
        assert (f"lacks the {part}: {lacking}" in caplog.text) == bool(lacking)
    assert ("lacks the trackers" in caplog.text) == (lacking == "tessera.analysis")
    assert not (run / "results.png").exists() and not (run / "report.html").exists()
