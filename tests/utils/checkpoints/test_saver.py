"""Schedule of checkpoint writes, and failures of a write."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints import saver as module
from tessera.utils.checkpoints.format import KEYS, WEIGHTS_KEYS, load_any_checkpoint, load_checkpoint, save_checkpoint
from tessera.utils.checkpoints.resume import dump_state
from tessera.utils.checkpoints.saver import Saver, snapshot
from tessera.utils.engine.step import StepFlags
from tessera.utils.errors import Interrupted, UserError, with_notes
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tests.utils.checkpoints.made_state import METRICS, assert_equal, make_state, open_saver, train
from tests.utils.machine.stand_in import StandIn

WAIT_S = 60.0  # for a thread that should be there immediately


class SlowDisk:
    """`save_checkpoint` that writes only once `go` is set; `begun` is set before, and `calls` names the files."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def __call__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.calls.append(path.name)
        self.begun.set()
        assert self.go.wait(WAIT_S)
        save_checkpoint(path, content)


def save_epoch(saver: Saver) -> None:
    """In the middle of a run; the file may be written later."""
    saver.after_epoch(0, None, is_best=False, stop=False)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(module, "save_checkpoint", slow)
    yield slow
    slow.go.set()


def fill_disk(monkeypatch: pytest.MonkeyPatch, fails: list[bool]) -> None:
    """Have the next writes fail or not, in this order."""
    writes = iter(fails)

    def save(path: Path, content: Mapping[str, Any]) -> None:
        if next(writes):
            raise UserError(f"step {content.get('step')} does not fit")
        save_checkpoint(path, content)

    monkeypatch.setattr(module, "save_checkpoint", save)


def test_training_continues_while_the_file_is_written(tmp_path: Path, disk: SlowDisk) -> None:
    """What is saved is the state at the moment of the save, whatever training does to the tensors until then."""
    state = make_state(optimizer="AdamW")
    train(state, 2)
    with open_saver(tmp_path, state) as saver:
        expected = snapshot(dump_state(state), Accelerator())
        save_epoch(saver)
        assert disk.begun.wait(WAIT_S)
        train(state, 3)
        assert not (saver.folder / "last.pt").exists()
        disk.go.set()
        saver.flush()
        loaded = load_checkpoint(saver.folder / "last.pt")
    assert_equal(dict(expected), {key: loaded[key] for key in expected})
    assert loaded["step"] == 2 and state.progress.step == 5


def test_the_last_epoch_writes_all_files_that_are_due(tmp_path: Path, disk: SlowDisk) -> None:
    state = make_state()
    disk.go.set()
    with open_saver(tmp_path, state, save_period=1) as saver:
        train(state, 1)
        saver.after_epoch(0, METRICS, is_best=True, stop=True)
        assert disk.calls == ["best.pt", "epoch0.pt", "last.pt"] and saver.best.name == "best.pt"
        best, period, last = (saver.folder / name for name in ("best.pt", "epoch0.pt", "last.pt"))
        assert period.read_bytes() == last.read_bytes()
        assert sorted(saver.folder.iterdir()) == sorted((best, period, last))
        saver.after_epoch(1, METRICS, is_best=False, stop=True)
        assert disk.calls[3:] == ["epoch1.pt", "last.pt"]
        assert saver.best.name == "best.pt"


@pytest.mark.parametrize("when", ["save", "flush"])
def test_a_failed_write_is_raised_once_at_the_next_save_or_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    state = make_state()
    with open_saver(tmp_path, state) as saver:
        train(state, 1)
        save_epoch(saver)
        saver.flush()
        before = (saver.folder / "last.pt").read_bytes()
        fill_disk(monkeypatch, [True, True])
        save_epoch(saver)
        with pytest.raises(UserError, match="does not fit"):
            saver.flush() if when == "flush" else save_epoch(saver)
        saver.flush()
    assert (saver.folder / "last.pt").read_bytes() == before


@pytest.mark.parametrize(("passes", "by_flush"), [(True, False), (True, True), (False, False)])
def test_a_stop_writes_its_file_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, passes: bool, by_flush: bool
) -> None:
    """On a device with a queue the flags of a step that is saved may be read only then."""
    fill_disk(monkeypatch, [True, not passes])
    state = make_state()
    with caplog.at_level(logging.WARNING), open_saver(tmp_path, state, save_steps=2) as saver:
        train(state, 1)
        save_epoch(saver)
        train(state, 1)
        monkeypatch.setattr(saver, "_flush_steps", lambda: StepFlags(stop=by_flush))
        with pytest.raises(Interrupted if passes else UserError, match="Stopped" if passes else "step 2 does not fit"):
            saver.after_step(stop=not by_flush)
        assert not passes or load_checkpoint(saver.folder / "last.pt")["step"] == 2
    assert caplog.text.count("The last checkpoint was not written") == 1
    assert "step 1 does not fit" in caplog.text


def test_a_saved_step_is_written_during_the_next_ones_and_before_a_stop(tmp_path: Path, disk: SlowDisk) -> None:
    state = make_state()
    with open_saver(tmp_path, state, save_steps=2) as saver:
        for _ in range(3):
            train(state, 1)
            saver.after_step(stop=False)
        assert not (saver.folder / "last.pt").exists()
        disk.go.set()
        saver.flush()
        assert load_checkpoint(saver.folder / "last.pt")["step"] == 2
        train(state, 1)
        with pytest.raises(Interrupted):
            saver.after_step(stop=True)
        assert load_checkpoint(saver.folder / "last.pt")["step"] == 4


def test_a_run_that_fails_waits_for_the_file_and_reports_its_error(
    tmp_path: Path, disk: SlowDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    train(state, 1)
    with pytest.raises(ZeroDivisionError), open_saver(tmp_path, state) as saver:
        save_epoch(saver)
        threading.Timer(0.2, disk.go.set).start()
        raise ZeroDivisionError
    assert load_checkpoint(saver.folder / "last.pt")["step"] == 1
    assert [path.name for path in saver.folder.iterdir()] == ["last.pt"]
    fill_disk(monkeypatch, [True])
    with pytest.raises(ZeroDivisionError), open_saver(tmp_path, state) as saver:
        save_epoch(saver)
        raise ZeroDivisionError
    assert "The last checkpoint was not written: step 1 does not fit" in caplog.text


def test_a_snapshot_shares_no_memory_and_keeps_its_containers() -> None:
    model = torch.nn.BatchNorm2d(3)
    live: dict[str, Any] = {"model": model.state_dict(), "list": [torch.ones(2)], "tuple": (1, "a", None), "n": 1.5}
    copied = snapshot(live, Accelerator())
    assert_equal(live, copied)
    assert isinstance(copied["model"], OrderedDict) and copied["model"]._metadata == live["model"]._metadata
    with torch.no_grad():
        model.weight.fill_(7)
    live["list"][0].fill_(7)
    live["list"].append(1)
    assert copied["model"]["weight"].tolist() == [1, 1, 1] and len(copied["list"]) == 1
    assert copied["list"][0].tolist() == [1, 1] and not copied["model"]["weight"].requires_grad


def test_a_snapshot_waits_for_the_device_once_and_keeps_the_order_in_memory() -> None:
    with StandIn() as device:
        layout = device.send(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        copied = snapshot({"weights": [device.send(torch.ones(2)), layout]}, device)
        assert device.waits == 1
        assert copied["weights"][1].stride() == layout.stride() and copied["weights"][0].tolist() == [1, 1]


def test_a_best_checkpoint_that_did_not_fit_is_written_after_a_stop_if_it_fits_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, [True, False, False])
    state = make_state()
    with open_saver(tmp_path, state) as saver:
        train(state, 1)
        saver.after_epoch(0, METRICS, is_best=True, stop=False)
        best = snapshot(state.ema.model.state_dict(), Accelerator())
        train(state, 1)
        with pytest.raises(Interrupted):
            saver.after_step(stop=True)
        assert_equal(dict(best), load_any_checkpoint(saver.folder / "best.pt")["ema"])
        assert load_checkpoint(saver.folder / "last.pt")["step"] == 2


def test_best_pt_holds_weights_and_metrics_alone(tmp_path: Path) -> None:
    state = make_state(optimizer="AdamW")
    with open_saver(tmp_path, state) as saver:
        train(state, 2)
        saver.after_epoch(0, METRICS, is_best=True, stop=True)
    best, last = (load_any_checkpoint(saver.folder / name) for name in ("best.pt", "last.pt"))
    assert tuple(best) == WEIGHTS_KEYS and tuple(last) == KEYS
    assert_equal(best, {key: last[key] for key in WEIGHTS_KEYS})
    assert_equal(dict(state.ema.model.state_dict()), best["ema"])
    assert {tensor.dtype for tensor in best["ema"].values()} == {torch.float32, torch.int64}
    assert best["thresholds"] == {"confidence": 0.3, "class_confidences": [0.25, 0.3]}
    assert best["metrics"]["map50"] == 0.8 and best["metrics"]["fitness"] == METRICS.fitness and best["imgsz"] == 64
    with pytest.raises(UserError, match=rf"best\.pt: holds weights alone.* Resume from {saver.folder}/last\.pt, or"):
        load_checkpoint(saver.folder / "best.pt")
    (saver.folder / "last.pt").unlink()
    with pytest.raises(UserError, match=r"weights alone.* Resume from the last\.pt of its run, or start .* --weights"):
        load_checkpoint(saver.folder / "best.pt")


def test_an_epoch_writes_one_whole_file_before_it_is_validated(tmp_path: Path, disk: SlowDisk) -> None:
    disk.go.set()
    state = make_state()
    with open_saver(tmp_path, state) as saver:
        for epoch, best in enumerate((True, False, True)):
            train(state, 1)
            saver.before_validation()
            saver.flush()
            last = load_checkpoint(saver.folder / "last.pt")
            assert (last["step_in_epoch"], last["metrics"], last["thresholds"]) == (1, None, None)
            state.progress.finish_epoch()
            saver.after_epoch(epoch, METRICS, is_best=best, stop=False)
        saver.flush()
        assert disk.calls == ["last.pt", "best.pt", "last.pt", "last.pt", "best.pt"]
        with pytest.raises(Interrupted, match="Stopped as requested in the validation of epoch 3"):
            saver.stop_validation()
        saver.after_epoch(3, METRICS, is_best=False, stop=True)
    last = load_checkpoint(saver.folder / "last.pt")
    assert (last["epoch"], last["step_in_epoch"], last["thresholds"]["confidence"]) == (3, 0, 0.3)


def test_without_saving_nothing_is_written_before_a_validation_but_a_stop_in_it_is(tmp_path: Path) -> None:
    state = make_state()
    with open_saver(tmp_path, state, nosave=True) as saver:
        train(state, 1)
        saver.before_validation()
        saver.flush()
        assert not saver.folder.exists()
        with pytest.raises(Interrupted):
            saver.stop_validation()
        assert load_checkpoint(saver.folder / "last.pt")["step_in_epoch"] == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_a_failure_ends_with_what_resumes_once_there_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A command knows no layers and heads of other programs, such as the `Net` of these tests."""
    if is_known:
        monkeypatch.setattr(module, "_is_known", lambda kind: True)
    last = tmp_path / "my run" / "weights" / "last.pt"
    last.parent.mkdir(parents=True)
    last.touch()  # of a run that this one replaces
    with open_saver(tmp_path / "my run", make_state()) as saver:
        assert saver.resume_line() == ""
        save_epoch(saver)
        saver.flush()
    own = f"Resume with tessera.train(resume='{last}') in the program that defines Net."
    line = f"Resume with: uv run train.py --resume '{last}'" if is_known else own
    with pytest.raises(UserError) as failed, World().advising(saver.resume_line):
        raise UserError("the disk is full")
    assert with_notes(failed.value, "error") == f"error\n{line}"
