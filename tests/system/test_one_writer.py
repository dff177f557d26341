"""Several starts of one run: one process writes at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.utils.ranks.run_lock import LOCK, RunLock
from tests.system.launch import ROOT, run_python, torchrun
from tests.system.tiny import flags, make_data

pytestmark = pytest.mark.slow


def test_pairs_of_starts_train_each_epoch_once() -> None:
    outcome = run_python("-m", "tests.system.pairs", "6", timeout=580)
    assert outcome.code == 0 and "6 pairs, 0 of them broken" in outcome.out, outcome.said


def test_no_rank_waits_for_the_first_one_longer_than_for_a_control_message(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=8, val=2)
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "opt.yaml").touch()
    with RunLock(tmp_path / "night") as lock:
        assert lock.take() is None
        args = flags(data, tmp_path, "--resume", "auto", "--name", "night")
        limits = {"TESSERA_CONTROL_TIMEOUT": "4", "TESSERA_LOCK_TIMEOUT": "10"}
        outcome = torchrun(ROOT / "train.py", *args, env=limits)
        assert outcome.code == 1 and "control message" not in outcome.err, outcome.said
        assert outcome.err.count("night is being written by process") == 1, outcome.said
        assert outcome.err.count("night is still being written by process") == 1, outcome.said
        assert {path.name for path in (tmp_path / "night").iterdir()} == {LOCK, "opt.yaml"}
