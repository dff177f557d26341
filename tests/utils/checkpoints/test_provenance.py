"""What a checkpoint says of its run beside the state."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import tessera
from tessera.utils.checkpoints import provenance
from tessera.utils.checkpoints.format import KEYS, STATE_KEYS
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run, git_revision, written_by
from tessera.utils.checkpoints.saved_state import dump_state
from tests.utils.checkpoints.made_state import make_state


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "REPO", tmp_path)
    assert git_revision() is None
    (tmp_path / ".git").mkdir()
    assert git_revision() is None  # not a repository after all
    (tmp_path / ".git").rmdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    if subprocess.run([*git, "init", "-q"], check=False, capture_output=True).returncode:
        pytest.skip("needs git")
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    revision = git_revision()
    assert revision is not None and len(revision) == 40
    (tmp_path / "file").write_text("2")
    assert git_revision() == f"{revision}-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None


def test_a_file_says_which_program_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "git_revision", lambda: "c0ffee")
    assert written_by() == {"tessera_version": tessera.__version__, "git": "c0ffee"}
    described = describe_run(make_state().model, {}, {}, 64, "", "c0ffee")
    assert (described["tessera_version"], described["git"]) == (tessera.__version__, "c0ffee")


def test_description_and_state_share_no_key() -> None:
    state = make_state()
    assert set(dump_state(state)) == set(STATE_KEYS)
    described = set(describe_run(state.model, {}, {}, 64, "")) | set(describe_metrics(None))
    assert described == set(KEYS) - set(STATE_KEYS)
