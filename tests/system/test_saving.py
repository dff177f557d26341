"""Background writing of checkpoints: training continues, and no process is forked meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.utils.checkpoints.format import load_checkpoint
from tests.system.launch import run_python
from tests.system.tiny import flags, make_data

pytestmark = pytest.mark.slow


def test_steps_run_while_a_file_is_written_and_forks_do_not(tmp_path: Path) -> None:
    """A loader worker would inherit the unfinished file, and keep its space on the disk for as long as it lives."""
    data = make_data(tmp_path / "data", train=32, val=8)
    args = flags(data, tmp_path / "runs", "--epochs", "3", "--noval")
    outcome = run_python(Path(__file__).with_name("saving_program.py"), *args)
    assert outcome.code == 0, outcome.said
    found = re.search(r"writes (\d+), forks (\d+), while writing: (\d+) steps, (\d+) forks", outcome.out)
    assert found, outcome.said
    writes, forks, steps, forks_while_writing = map(int, found.groups())
    assert (writes, forks_while_writing) == (5, 0), outcome.said  # in the last epoch last.pt, best.pt, last.pt
    assert forks == 2, outcome.said  # a worker of each loader, the validation's when epoch 1 has been saved
    assert steps > 0, outcome.said
    assert load_checkpoint(tmp_path / "runs/exp/weights/last.pt")["epoch"] == 3
    assert not list(tmp_path.rglob("*.tmp"))
