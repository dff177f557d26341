"""Which files an epoch leaves, when they are written, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tessera.utils.checkpoints import saver as module
from tessera.utils.checkpoints.format import KEYS, WEIGHTS_KEYS, load_any_checkpoint, load_checkpoint
from tessera.utils.errors import Interrupted, UserError
from tests.utils.checkpoints.made_saver import METRICS, SlowDisk, open_saver
from tests.utils.checkpoints.made_state import assert_equal, make_state, train


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    recording = SlowDisk()
    recording.go.set()
    monkeypatch.setattr(module, "save_checkpoint", recording)
    yield recording


def test_the_best_file_holds_weights_alone_with_what_was_measured(tmp_path: Path) -> None:
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


def test_an_epoch_costs_one_whole_file_which_lies_there_before_it_is_validated(tmp_path: Path, disk: SlowDisk) -> None:
    state = make_state()
    with open_saver(tmp_path, state) as saver:
        for epoch, best in enumerate((True, False, True)):
            train(state, 1)
            saver.before_validation()
            saver.settle()
            last = load_checkpoint(saver.folder / "last.pt")
            assert (last["step_in_epoch"], last["metrics"], last["thresholds"]) == (1, None, None)
            state.progress.finish_epoch()
            saver.after_epoch(epoch, METRICS, is_best=best, stop=False)
        saver.settle()
        assert disk.calls == ["last.pt", "best.pt", "last.pt", "last.pt", "best.pt"]
        with pytest.raises(Interrupted, match="Stopped as asked in the validation of epoch 3"):
            saver.stop_validation()
        saver.after_epoch(3, METRICS, is_best=False, stop=True)
    last = load_checkpoint(saver.folder / "last.pt")
    assert (last["epoch"], last["step_in_epoch"], last["thresholds"]["confidence"]) == (3, 0, 0.3)


def test_without_saving_nothing_is_written_before_a_validation_but_a_stop_in_it_is(tmp_path: Path) -> None:
    state = make_state()
    with open_saver(tmp_path, state, nosave=True) as saver:
        train(state, 1)
        saver.before_validation()
        saver.settle()
        assert not saver.folder.exists()
        with pytest.raises(Interrupted):
            saver.stop_validation()
        assert load_checkpoint(saver.folder / "last.pt")["step_in_epoch"] == 1
