"""No tracker breaks or delays a run, wherever it raises, hangs or falls behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tessera.utils.report.trackers import loggers
from tessera.utils.report.trackers.loggers import Loggers
from tests.utils.report.fake_trackers import CONFIG, install

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
        monkeypatch.setattr(loggers, limit, value)
    started = time.monotonic()
    with closing(Loggers(["wandb"], tmp_path, CONFIG)) as log:
        log.scalars({"a": 1.0}, 0)
        assert active(log) == ["wandb"]
        monkeypatch.setattr(loggers, limit, value)  # a busy machine may take longer until here
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
    install(monkeypatch, "clearml", Task=SimpleNamespace(init=wall))
    monkeypatch.setattr(loggers, limit, 0.3)
    started = time.monotonic()
    log = Loggers(["wandb", "clearml"], tmp_path, CONFIG)
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
    monkeypatch.setattr(loggers, "CLOSE_S", 0.3)
    with closing(Loggers(["wandb", "tensorboard"], tmp_path, CONFIG)) as log:
        log.scalars({"a": 1.0}, 0)
    assert [text.partition(":")[0] for text in caplog.messages] == [OFF]
    assert len(EventAccumulator(str(tmp_path)).Reload().Scalars("a")) == 1


def test_a_process_ends_though_a_tracker_hangs(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("import time\ndef __getattr__(name):\n    time.sleep(600)\n")
    program = f"""
import atexit, contextlib, pathlib, time
from tessera.utils.report.trackers import loggers
from tessera.utils import startup
loggers.CLOSE_S = startup.END_S = 0.3
atexit.register(time.sleep, 600)  # as ClearML's package may
with contextlib.closing(loggers.Loggers(["wandb"], pathlib.Path({str(tmp_path)!r}), {{}})) as log:
    log.scalars({{"a": 1.0}}, 0)
startup.end_process(7)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=False).returncode == 7
