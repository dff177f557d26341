"""Trackers with their real packages, where these are installed: what was reported is there, also after a resume."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tessera.utils.report.trackers.loggers import Loggers

pytestmark = pytest.mark.slow
CONFIG = {"project": "runs/train", "epochs": 3, "hyp": {"lr0": 0.01}}


def report_and_resume(name: str, run: Path, picture: Path) -> None:
    """Two epochs, pictures and a checkpoint; then another epoch of the resumed run."""
    run.mkdir(parents=True)
    (run / "best.pt").write_bytes(b"weights")
    for epochs in ((0, 1), (2,)):
        with Loggers([name], run, CONFIG, resume=epochs == (2,)) as log:
            for epoch in epochs:
                log.scalars({"train/box_loss": 0.5 - epoch / 10, "metrics/mAP_0.5:0.95": epoch / 10}, epoch)
                log.image("predictions", picture, epoch)
            log.image("results", picture, 0)  # of the best epoch, an earlier one
            log.checkpoint(run / "best.pt")
            (channel,) = log._channels
        assert not channel._thread.is_alive()


@pytest.fixture
def reported(request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tracker that the test is named after has reported a run; nothing has switched it off."""
    name = request.node.name.removeprefix("test_")
    report_and_resume(name, tmp_path / "runs" / "exp", request.getfixturevalue("picture"))
    assert "switched off" not in caplog.text


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    request.getfixturevalue("reported")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("tessera").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["epochs"]) == ("FINISHED", "exp", "3")
    history = client.get_metric_history(run.info.run_id, "metrics/mAP_0.5-0.95")
    assert [(point.step, point.value) for point in history] == [(0, 0), (1, 0.1), (2, 0.2)]
    kept = {file.path for folder in ("images", "weights") for file in client.list_artifacts(run.info.run_id, folder)}
    assert kept == {"images/val_batch0_pred.jpg", "weights/best.pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "val_batch0_pred.jpg"], (
        "nothing in the working folder"
    )


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    request.getfixturevalue("reported")
    (name,) = storage.get_runs("tessera")
    assert name.startswith("exp-")
    rows = storage.get_logs("tessera", name)
    losses = [(row["step"], row["train/box_loss"]) for row in rows if "train/box_loss" in row]
    assert losses == [(0, 0.5), (1, 0.4), (2, 0.3)]
    assert [row["step"] for row in rows if "results" in row] == [0, 0]
    assert storage.get_run_config("tessera", name)["epochs"] == 3
    files = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in files].count(b"weights") == 1


def test_comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "comet"))
    pytest.importorskip("comet_ml")
    request.getfixturevalue("reported")
    messages, key = [], (tmp_path / "runs" / "exp" / "comet.id").read_text()
    for file in sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(file) as archive:
            messages += [json.loads(line) for line in archive.read("messages.json").splitlines()]
            assert json.loads(archive.read("experiment.json"))["offline_id"] == key
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    losses = [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == "train/box_loss"]
    assert losses == [(0, 0.5), (1, 0.4), (2, 0.3)]
    uploads = [m["payload"] for m in messages if m["type"] == "file_upload"]
    assert sum(upload["upload_type"] == "model-element" for upload in uploads) == 2


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Its offline file has a format of its own: what is read is the pictures that it keeps beside it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    request.getfixturevalue("reported")
    runs = sorted((tmp_path / "runs" / "exp" / "wandb").glob("offline-run-*"))
    kept = [sorted(path.name.split("_")[0] for path in run.rglob("*.jpg")) for run in runs]
    assert kept == [["predictions", "predictions", "results"], ["predictions", "results"]]
    assert {run.name.rpartition("-")[2] for run in runs} == {(tmp_path / "runs" / "exp" / "wandb.id").read_text()}


def test_clearml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("clearml")
    request.getfixturevalue("reported")
    key = (tmp_path / "runs" / "exp" / "clearml.id").read_text()
    (file,) = (tmp_path / "clearml").rglob("*.zip")  # of the resumed run, with what came before
    with zipfile.ZipFile(file) as archive:
        events = [event for line in archive.read("metrics.jsonl").splitlines() for event in json.loads(line)]
        task = json.loads(archive.read("task.json"))
        kept = [Path(name).name for name in archive.namelist() if "/images/" in name]
        assert [archive.read(name) for name in archive.namelist() if name.endswith("best.pt")] == [b"weights"]
    losses = [(event["iter"], event["value"]) for event in events if event.get("variant") == "box_loss"]
    assert losses == [(0, 0.5), (1, 0.4), (2, 0.3)]
    assert (task["id"], task["name"], task["project_name"]) == (key, "exp", "tessera")
    assert task["hyperparams"]["config"]["hyp/lr0"]["value"] == "0.01"
    assert sorted(kept) == [
        f"images_{name}.jpg"
        for name in (*(f"predictions_{e:08}" for e in range(3)), "results_00000000", "results_00000001")
    ]
