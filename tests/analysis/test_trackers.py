"""Experiment trackers: what they receive; none breaks or delays a run, wherever it raises, hangs or falls behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import cv2
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tessera.analysis import trackers
from tessera.analysis.trackers import TRACKERS, Loggers, import_tracker
from tessera.utils.config import LOGGER_NAMES
from tessera.utils.errors import ConfigError

CONFIG = {"project": "runs/train", "epochs": 3, "hyp": {"lr0": 0.01}}


class Recorder:
    """Stands for any object of a tracker's package; every call lands in one list as (name, args, kwargs)."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str, **attributes: Any) -> None:
        self.calls, self.path = calls, path
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Callable[..., Recorder]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((f"{self.path}.{name}", args, kwargs))
            return Recorder(self.calls, f"{self.path}.{name}()", id="id-1", info=SimpleNamespace(run_id="id-1"))

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def install(monkeypatch: pytest.MonkeyPatch, tracker: str, **members: Any) -> Recorder:
    """Put a fake package where the import of `tracker` finds it."""
    fake = Recorder([], tracker)
    module = ModuleType(TRACKERS[tracker].module)
    module.__getattr__ = lambda name: getattr(fake, name)  # type: ignore[method-assign]
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, TRACKERS[tracker].module, module)
    return fake


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A small red image."""
    path = tmp_path / "val_batch0_pred.jpg"
    cv2.imwrite(str(path), np.full((20, 30, 3), (0, 0, 255), np.uint8))
    return path


def use(names: list[str], run: Path, sample: Path, *, resume: bool = False) -> None:
    with closing(Loggers(names, run, CONFIG, resume=resume)) as log:
        log.scalars({"train/box_loss": 0.5, "metrics/mAP_0.5:0.95": float("nan")}, 2)
        log.image("val_batch0_pred", sample, 2)
        log.checkpoint(run / "best.pt")


REMOTE = ("wandb", "mlflow")


def test_the_names_of_the_flag_are_the_trackers() -> None:
    assert tuple(TRACKERS) == LOGGER_NAMES


def test_tensorboard_holds_scalars_and_images(tmp_path: Path, sample: Path) -> None:
    use(["tensorboard"], tmp_path / "run", sample)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert events.Tags()["scalars"] == ["train/box_loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/box_loss")] == [(2, 0.5)]
    (shown,) = events.Images("val_batch0_pred")
    assert (shown.step, shown.width, shown.height) == (2, 30, 20)
    blue, _, red = cv2.imdecode(np.frombuffer(shown.encoded_image_string, np.uint8), cv2.IMREAD_COLOR)[10, 15]
    assert red > 200 and blue < 50
    assert "config/text_summary" in events.Tags()["tensors"]


def test_images_in_an_event_file_stay_small_and_legible(tmp_path: Path) -> None:
    """Whatever they hold (noise compresses worst): a run has 26, and viewers read the file whole."""
    cv2.imwrite(str(tmp_path / "noise.jpg"), np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "chart.png"), np.full((1200, 1500, 3), 255, np.uint8))
    with closing(Loggers(["tensorboard"], tmp_path / "run", {})) as log:
        log.image("noise", tmp_path / "noise.jpg", 0)
        log.image("chart", tmp_path / "chart.png", 0)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    (noise,), (chart,) = events.Images("noise"), events.Images("chart")
    assert len(noise.encoded_image_string) < 300_000 and noise.width == 800
    assert (chart.width, chart.height) == (800, 640)


def test_wandb(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "wandb")
    use(["wandb"], tmp_path, sample)
    ((_, init),) = fake.named("wandb.init")
    assert (init["project"], init["name"], init["config"], init["id"]) == ("tessera", tmp_path.name, CONFIG, None)
    logged = fake.named("wandb.init().log")
    assert logged[0] == (({"train/box_loss": 0.5},), {"step": 2})
    assert list(logged[1][0][0]) == ["val_batch0_pred"] and logged[1][1] == {"commit": False}
    assert fake.named("wandb.Image") == [((str(sample),), {"caption": "epoch 2"})]
    assert fake.named("wandb.Artifact().add_file") == [((str(tmp_path / "best.pt"),), {})]
    assert len(fake.named("wandb.init().log_artifact")) == len(fake.named("wandb.init().finish")) == 1
    use(["wandb"], tmp_path, sample, resume=True)
    assert fake.named("wandb.init")[1][1]["id"] == "id-1"


@pytest.mark.parametrize("has_server", [True, False])
def test_mlflow(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, has_server: bool) -> None:
    """Without a server runs are in their project; parameters go in batches of 100."""
    entities, client = SimpleNamespace(Metric=lambda *a: a, Param=lambda *a: a), "mlflow.MlflowClient()"
    fake = install(monkeypatch, "mlflow", entities=entities, is_tracking_uri_set=lambda: has_server)
    run = tmp_path / "exp"
    run.mkdir()
    for resume in (False, True):
        with closing(Loggers(["mlflow"], run, {f"key{i}": i for i in range(250)}, resume=resume)) as log:
            log.scalars({"metrics/mAP_0.5:0.95": 0.25}, 2)
            log.image("val_batch0_pred", sample, 2)
            log.checkpoint(run / "best.pt")
    uri = None if has_server else f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert fake.named("mlflow.MlflowClient") == [((uri,), {})] * 2, "MLFLOW_TRACKING_URI applies"
    *params, (_, metrics), _ = fake.named(f"{client}.log_batch")
    assert [len(kwargs["params"]) for _, kwargs in params] == [100, 100, 50]
    ((key, value, milliseconds, step),) = metrics["metrics"]
    assert (key, value, step) == ("metrics/mAP_0.5-0.95", 0.25, 2)
    assert milliseconds == pytest.approx(time.time() * 1000, abs=60_000)
    artifacts = [(args, kwargs["artifact_path"]) for args, kwargs in fake.named(f"{client}.log_artifact")]
    assert artifacts == [(("id-1", str(sample)), "images"), (("id-1", str(run / "best.pt")), "weights")] * 2
    assert fake.named(f"{client}.set_terminated") == [(("id-1",), {})] * 2
    assert fake.named(f"{client}.update_run") == [(("id-1",), {"status": "RUNNING"})]
    assert len(fake.named(f"{client}.create_run")) == 1


@pytest.mark.parts_fail
@pytest.mark.parametrize("name", REMOTE)
def test_a_new_run_does_not_continue_one_whose_id_lies_there(
    name: str, tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str | None] = []
    install(monkeypatch, name)
    (tmp_path / f"{name}.id").write_text("old")
    monkeypatch.setattr(TRACKERS[name], "__init__", lambda self, api, run, config, previous: opened.append(previous))
    for resume in (False, True):
        Loggers([name], tmp_path, CONFIG, resume=resume).close()
    assert opened == [None, "old"]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_the_users_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TRACKERS[name].module, None)
    with pytest.raises(ConfigError, match=rf"--loggers {name}: .*pip install {TRACKERS[name].package}`"):
        import_tracker(name)


def test_a_tracker_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> ModuleType:
        raise RuntimeError("protobuf is too new")

    monkeypatch.setattr(trackers.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError: protobuf is too new\)"):
        import_tracker("wandb")


ROOT = Path(__file__).resolve().parents[3]
OFF = "wandb is switched off, the run continues without it"
Wall = Callable[..., object]


def active(log: Loggers) -> list[str]:
    return [channel.name for channel in log._channels if channel.alive]


@pytest.fixture
def wall() -> Iterator[Wall]:
    """A call that blocks until the test is over."""
    over = threading.Event()
    yield lambda *_, **__: over.wait(100)
    over.set()


@pytest.mark.parts_fail
@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1)])
def test_a_tracker_that_raises_is_switched_off_with_one_warning(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "wandb", init=MagicMock(side_effect=error))
    with closing(Loggers(["wandb", "tensorboard"], tmp_path, CONFIG)) as log:
        for epoch in range(5):
            log.scalars({"a": 1.0}, epoch)
            time.sleep(0.01)
        assert active(log) == ["tensorboard"]
    assert caplog.messages == [f"{OFF}: {type(error).__name__}: {error}"]
    assert len(EventAccumulator(str(tmp_path)).Reload().Scalars("a")) == 5


@pytest.mark.parts_fail
@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [("CALL_S", 0.5, "a call has not returned for 0.5 s"), ("MOST_CALLS", 10, "it is 10 calls behind")],
)
def test_a_tracker_that_hangs_or_falls_behind_is_switched_off_not_waited_for(
    limit: str, value: float, why: str, tmp_path: Path, wall: Wall, request: pytest.FixtureRequest
) -> None:
    monkeypatch, caplog = request.getfixturevalue("monkeypatch"), request.getfixturevalue("caplog")
    install(monkeypatch, "wandb", init=wall)
    if limit == "MOST_CALLS":
        monkeypatch.setattr(trackers, limit, value)
    started = time.monotonic()
    with closing(Loggers(["wandb"], tmp_path, CONFIG)) as log:
        log.scalars({"a": 1.0}, 0)
        assert active(log) == ["wandb"]
        monkeypatch.setattr(trackers, limit, value)  # a busy machine may take longer until here
        time.sleep(0.51)
        for epoch in range(50):
            log.scalars({"a": 1.0}, epoch)
        assert active(log) == []
    assert time.monotonic() - started < 20
    assert caplog.messages == [f"{OFF}: {why}"]


@pytest.mark.parts_fail
@pytest.mark.parametrize(("limit", "failed"), [("CLOSE_S", False), ("CLOSE_FAILED_S", True)])
def test_closing_waits_a_bounded_time_for_all_trackers_together(
    limit: str, failed: bool, tmp_path: Path, wall: Wall, request: pytest.FixtureRequest
) -> None:
    monkeypatch, caplog = request.getfixturevalue("monkeypatch"), request.getfixturevalue("caplog")
    install(monkeypatch, "wandb", init=wall)
    install(monkeypatch, "mlflow", MlflowClient=wall, is_tracking_uri_set=lambda: True)
    monkeypatch.setattr(trackers, limit, 0.3)
    started = time.monotonic()
    log = Loggers(["wandb", "mlflow"], tmp_path, CONFIG)
    log.close(failed=failed)
    assert 0.3 <= time.monotonic() - started < 20
    log.close(failed=failed)
    assert len(caplog.messages) == 2 and all("did not finish in time" in text for text in caplog.messages)


@pytest.mark.parts_fail
@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_hangs_anywhere_is_left_behind(
    where: str, tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: dict[str, Any] = {name: lambda *_, **__: None for name in ("log", "finish")} | {where: wall}
    install(monkeypatch, "wandb", init=calls.get("init", lambda **_: SimpleNamespace(id="id-1", **calls)))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.3)
    with closing(Loggers(["wandb", "tensorboard"], tmp_path, CONFIG)) as log:
        log.scalars({"a": 1.0}, 0)
    assert [text.partition(":")[0] for text in caplog.messages] == [OFF]
    assert len(EventAccumulator(str(tmp_path)).Reload().Scalars("a")) == 1


def test_a_process_ends_though_a_tracker_hangs(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("import time\ndef __getattr__(name):\n    time.sleep(600)\n")
    program = f"""
import contextlib, pathlib, sys
from tessera.analysis import trackers
trackers.CLOSE_S = 0.3
with contextlib.closing(trackers.Loggers(["wandb"], pathlib.Path({str(tmp_path)!r}), {{}})) as log:
    log.scalars({{"a": 1.0}}, 0)
sys.exit(7)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=False).returncode == 7


@pytest.mark.slow
def test_mlflow_with_its_own_package(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
                log.image("predictions", sample, epoch)
            log.image("results", sample, 0)  # of the best epoch, an earlier one
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
