"""MLflow with its real package: what was reported is there, also after a resume."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tessera.utils.report.trackers import Loggers
from tests.utils.report.fake_trackers import CONFIG


@pytest.mark.slow
def test_mlflow(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "runs" / "exp"
    run.mkdir(parents=True)
    (run / "best.pt").write_bytes(b"weights")
    for epochs in ((0, 1), (2,)):  # a run, and its resume
        with closing(Loggers(["mlflow"], run, CONFIG, resume=epochs == (2,))) as log:
            for epoch in epochs:
                log.scalars({"train/box_loss": 0.5 - epoch / 10, "metrics/mAP_0.5:0.95": epoch / 10}, epoch)
                log.image("predictions", picture, epoch)
            log.image("results", picture, 0)  # of the best epoch, an earlier one
            log.checkpoint(run / "best.pt")
            (channel,) = log._channels
        assert not channel._thread.is_alive()
    assert "switched off" not in caplog.text
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (kept_run,) = client.search_runs([client.get_experiment_by_name("tessera").experiment_id])
    assert (kept_run.info.status, kept_run.info.run_name, kept_run.data.params["epochs"]) == ("FINISHED", "exp", "3")
    history = client.get_metric_history(kept_run.info.run_id, "metrics/mAP_0.5-0.95")
    assert [(point.step, point.value) for point in history] == [(0, 0), (1, 0.1), (2, 0.2)]
    kept = {
        file.path for folder in ("images", "weights") for file in client.list_artifacts(kept_run.info.run_id, folder)
    }
    assert kept == {"images/val_batch0_pred.jpg", "weights/best.pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "val_batch0_pred.jpg"], (
        "nothing in the working folder"
    )
